"""The two servers of a benchmark, each a process on the first core: the proxy, and a bare handler of the same JSON."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.support import free_port

REPLY_TOKENS = 128
REPLY_VARIABLE = "TOKENGROVE_TEST_BENCH_REPLY"
START_TIMEOUT_S = 60.0


def bare_app() -> Starlette:
    """Build the bare handler: it reads the body as JSON and writes the proxy's reply as JSON. A factory for uvicorn."""
    reply = orjson.loads(Path(os.environ[REPLY_VARIABLE]).read_bytes())

    async def answer(request: Request) -> Response:
        body = orjson.loads(await request.body())
        return Response(orjson.dumps({**reply, "model": body["model"]}), media_type="application/json")

    return Starlette(routes=[Route("/{session}/v1/chat/completions", answer, methods=["POST"])])


@dataclass(frozen=True, slots=True)
class Server:
    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_ns(self) -> int:
        """Return the CPU time of all threads so far, of its workers too, in ns; 0 if the system does not report it."""
        return _cpu_ns(self.pid)

    def waited_ns(self) -> int:
        """Return how long its main thread has waited for a core that other processes used, in ns."""
        return int(Path(f"/proc/{self.pid}/task/{self.pid}/schedstat").read_text().split()[1])


def _cpu_ns(pid: int) -> int:
    tasks = list(Path(f"/proc/{pid}/task").glob("*"))
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    own = sum(int((task / "schedstat").read_text().split()[0]) for task in tasks)
    return own + sum(map(_cpu_ns, children))


@contextmanager
def server_process(
    arguments: list[str],
    port: int,
    folder: Path,
    *,
    core: int | None = 0,
    inherited: tuple[int, ...] = (),
    **environment: str,
) -> Iterator[Server]:
    """Run a server until the block ends. Its output goes to a file, which is shown if it does not start.

    `core`: the one that it runs on; None for any. `inherited`: file descriptors that the server keeps open.
    """
    log = folder / f"{port}.log"
    with log.open("wb") as output, nullcontext() if core is None else on_core(core):
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=output,
            pass_fds=inherited,
            env={**os.environ, **environment},
        )
    try:
        wait_until_answering(process, port, log)
        yield Server(port, process.pid)
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def wait_until_answering(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Wait for the first answer of any status. Raises SystemExit with the log if there is none."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if _answers(port):
            return
        time.sleep(0.05)
    raise SystemExit(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _answers(port: int) -> bool:
    """Return whether the server answers. A connection alone is no proof: a listening socket accepts it before that."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as probe:
            probe.sendall(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            return bool(probe.recv(1))
    except OSError:
        return False


@contextmanager
def on_core(index: int) -> Iterator[None]:
    """Run on one core, if there are two; processes started in the block keep that core."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, {cores[index]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def allow_open_files() -> None:
    """Raise this process's limit of open files, and so that of the processes it starts, to what the system allows."""
    import resource  # not on Windows

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def proxy_server(
    folder: Path, tokenizer: Path | None, engine: str = "scripted", *options: str
) -> AbstractContextManager[Server]:
    """Run a proxy. `engine`: scripted, or the URL of a server; `options`: further flags."""
    port = free_port()
    return server_process(["-m", "tokengrove", *serving(port, folder, tokenizer, engine), *options], port, folder)


def serving(port: int, folder: Path, tokenizer: Path | None, engine: str = "scripted") -> list[str]:
    """Return the command line of a proxy whose database is in `folder`. `engine`: scripted, or the URL of a server."""
    arguments = ["serve", "--port", str(port), "--database-url", f"sqlite:///{folder / 'bench.db'}"]
    arguments += ["--engine", engine]
    if engine == "scripted":
        arguments += ["--engine-arg", f"tokens={REPLY_TOKENS}"]
    return arguments + (["--tokenizer", str(tokenizer)] if tokenizer else [])


def bare_server(folder: Path, reply: Path) -> AbstractContextManager[Server]:
    port = free_port()
    arguments = ["-m", "uvicorn", "--factory", "tests.bench.servers:bare_app", "--port", str(port)]
    arguments += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    return server_process(arguments, port, folder, **{REPLY_VARIABLE: str(reply)})
