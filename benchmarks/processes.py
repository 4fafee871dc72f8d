"""Processes of a run: started on a core of their own, measured with all their children, and killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

START_S = 120.0


class NotStarted(RuntimeError):
    """A process ended, or did not answer in time. The message has the end of its output."""


class Process:
    """A server and its children. Its output goes to a file."""

    def __init__(
        self, arguments: Sequence[str], port: int, log: Path, environment: Mapping[str, str], core: int | None
    ) -> None:
        self.port, self._log = port, log
        with log.open("ab") as output, on_core(core):
            self._popen = subprocess.Popen(
                list(arguments),
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **environment},
                cwd=log.parent,
                start_new_session=True,
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_answering(self, path: str) -> None:
        """Wait for an HTTP answer below status 500. Raises NotStarted."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            if self._popen.poll() is not None:
                break
            if _answers(self.port, path):
                return
            time.sleep(0.05)
        raise NotStarted(f"it did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def tree(self) -> list[psutil.Process]:
        """Return the process and all that it started."""
        try:
            own = psutil.Process(self._popen.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def cpu_s(self) -> float:
        """Return the CPU time of all threads of the tree so far."""
        return sum(map(_cpu_s, self.tree()))

    def rss_mb(self) -> float:
        """Return the resident memory of the tree. Pages that its processes share are counted in each."""
        total = 0
        for process in self.tree():
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
        return total / 2**20

    def kill(self) -> None:
        """Send SIGKILL to the whole tree, and wait until it is gone."""
        tree = self.tree()
        for process in tree:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        self._popen.wait()
        psutil.wait_procs(tree)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL to what is left after ten seconds."""
        tree = self.tree()
        self._popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(10)
        _, alive = psutil.wait_procs(tree, 0 if self._popen.poll() is None else 2)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._popen.wait()


def _cpu_s(process: psutil.Process) -> float:
    """Return the CPU time of a process: from the scheduler in ns where Linux tells it, else in clock ticks."""
    try:
        tasks = list(Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
        if tasks:
            return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9
        times = process.cpu_times()
        return float(times.user + times.system)
    except (OSError, psutil.NoSuchProcess):
        return 0.0


def _answers(port: int, path: str) -> bool:
    request = f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5.0) as probe:
            probe.sendall(request.encode())
            head = probe.recv(64).split()
            return len(head) > 1 and int(head[1]) < 500
    except (OSError, ValueError):
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def on_core(index: int | None) -> Iterator[None]:
    """Run on one core if there are several; processes that are started in the block keep it. -1: all but the first."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    if index is None or len(cores) < 2:
        yield
        return
    os.sched_setaffinity(0, set(cores[1:]) if index < 0 else {cores[index]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
