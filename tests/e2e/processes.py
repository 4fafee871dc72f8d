"""Real servers and commands in separate processes, which tests can kill.

Each is forked from a process that has already imported their packages, because those imports take three seconds of
CPU. Otherwise it is an ordinary process with its own id, signals, output, environment and exit code. `execute` starts
a new interpreter instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import multiprocessing
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(["tests.e2e.preloaded"])


class Process:
    """`tokengrove serve` on a free port. `url`: its address, once it listens. `output`: everything printed so far."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        database_url: str | None = None,
        python: str | None = None,
        root: Path = ROOT,
    ) -> None:
        arguments = ["serve", "--port", "0", *flags]
        arguments += ["--database-url", database_url or f"sqlite:///{folder / 'served.db'}"]
        # The tests of clients may run in an environment without the server's packages.
        python = os.environ.get("TOKENGROVE_TEST_SERVER_PYTHON", python)
        if root != ROOT:
            python = python or sys.executable
        self._process: _Running = _Executed(python, arguments, folder, root) if python else _Forked(arguments, folder)
        self.output = ""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = self._wait_for_url()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """kill -9."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> int:
        """The exit code, once the process has ended."""
        code = self._process.wait(START_TIMEOUT_S)
        self._reader.join()
        return code

    def _read(self) -> None:
        with self._process.output as output:
            for line in output:
                self.output += line
                self._lines.put(line)
        self._lines.put("")

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            line = self._lines.get(timeout=START_TIMEOUT_S)
            if " at http://" in line:
                return line.rsplit(" at ", 1)[1].strip()
            if '"event": "started"' in line:
                return str(json.loads(line)["url"])
            if not line:
                break
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.output}")


@contextlib.contextmanager
def server_process(
    folder: Path, *flags: str, database_url: str | None = None, python: str | None = None, root: Path = ROOT
) -> Iterator[Process]:
    """Run a server during the block; `python`: the interpreter to start, instead of a fork; `root`: of a checkout."""
    process = Process(folder, *flags, database_url=database_url, python=python, root=root)
    try:
        yield process
    finally:
        if process.alive:
            process.kill()


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Processes that start in the block take SIGINT, as those of a terminal do.

    A shell ignores it in what it runs in the background, tests too, and new programs inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def told_of_stop(process: Process) -> list[str]:
    """The sentences of the log about a stop that has ended, but for those that tell again what it still waits for."""
    lines = [line for line in process.output.splitlines() if re.search(r" stopp(ing|ed)\b", line)]
    sentences = [line.split(None, 2)[-1] for line in lines]
    return [sentence for sentence in sentences if not sentence.startswith("stopping: still ")]


class Command:
    """`tokengrove ARGUMENTS` in a forked process, from its start until `wait`."""

    def __init__(self, *arguments: str, cwd: Path, **environment: str) -> None:
        self.arguments = arguments
        self._forked = _Forked(arguments, cwd, separately=True, **environment)
        self.pid = self._forked.pid
        readers = ThreadPoolExecutor(2)
        self._printed = [readers.submit(_read_all, file) for file in (self._forked.output, self._forked.errors)]
        readers.shutdown(wait=False)

    @property
    def alive(self) -> bool:
        return self._forked.poll() is None

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait until the process has ended, and whoever else has its output open."""
        code = self._forked.wait(START_TIMEOUT_S)
        output, errors = (printed.result(START_TIMEOUT_S) for printed in self._printed)
        return subprocess.CompletedProcess(self.arguments, code, output, errors)


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `tokengrove ARGUMENTS` in a forked process until it ends."""
    return Command(*arguments, cwd=cwd, **environment).wait()


def execute(
    *arguments: str, cwd: Path, timeout_s: float = START_TIMEOUT_S, root: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run `tokengrove ARGUMENTS` in a new interpreter until it ends. `root`: of another checkout."""
    command = [sys.executable, "-m", "tokengrove", *arguments]
    environment = _environment({"PYTHONPATH": str(root)})
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout_s)


def fork(target: Callable[..., object], *arguments: Any) -> multiprocessing.process.BaseProcess:
    """Start a process that calls `target`."""
    process = _forks.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class _Running(Protocol):
    """A process whose output is being read."""

    pid: int
    output: Any

    def poll(self) -> int | None: ...

    def wait(self, timeout_s: float) -> int: ...


class _Executed:
    def __init__(self, python: str, arguments: list[str], folder: Path, root: Path) -> None:
        self._process = subprocess.Popen(
            [python, "-m", "tokengrove", *arguments],
            cwd=folder,
            env=_environment({"PYTHONUNBUFFERED": "1", "PYTHONPATH": str(root)}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.pid, self.output, self.poll = self._process.pid, self._process.stdout, self._process.poll

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)


class _Forked:
    """A forked process. `output`, and `errors` if `separately`, are text files that end with the process."""

    def __init__(
        self, arguments: list[str] | tuple[str, ...], folder: Path, *, separately: bool = False, **environment: str
    ) -> None:
        pipes = [_forks.Pipe(duplex=False) for _ in range(2 if separately else 1)]
        writers = [writer for _, writer in pipes]
        self._process = _forks.Process(
            target=_command, args=(list(arguments), str(folder), _environment(environment), writers)
        )
        self._process.start()
        for writer in writers:
            writer.close()
        self.output, self.errors = [_text(reader) for reader, _ in pipes] if separately else (_text(pipes[0][0]), None)
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout_s: float) -> int:
        self._process.join(timeout_s)
        assert self._process.exitcode is not None, "the process did not end"
        return self._process.exitcode


def _command(arguments: list[str], folder: str, environment: Mapping[str, str], writers: list[Connection]) -> None:
    """Run `tokengrove ARGUMENTS` in the forked process."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["tokengrove", *arguments]
    for descriptor, stream, writer in ((1, sys.stdout, writers[0]), (2, sys.stderr, writers[-1])):
        os.dup2(writer.fileno(), descriptor)
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for writer in writers:
        writer.close()
    faulthandler.enable()  # SIGABRT shows where it hangs
    signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal; see `interruptible`
    from tokengrove.commands import main

    main()


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def _text(reader: Connection) -> Any:
    with reader:
        return os.fdopen(os.dup(reader.fileno()), encoding="utf-8")


def _read_all(file: Any) -> str:
    with file:
        return str(file.read())
