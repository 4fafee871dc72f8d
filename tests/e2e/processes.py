"""Real servers in processes of their own, to be killed."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0


class Process:
    """`tokengrove serve` on a free port; `url` once it listens, `output` what it printed so far."""

    def __init__(self, folder: Path, *flags: str, database_url: str | None = None) -> None:
        # Clients under test may live in an environment of their own, without the server.
        python = os.environ.get("TOKENGROVE_SERVER_PYTHON", sys.executable)
        command = [python, "-m", "proxy.commands", "serve", "--port", "0", *flags]
        command += ["--database-url", database_url or f"sqlite:///{folder / 'served.db'}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
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
        self._process.kill()
        self.wait()

    def terminate(self) -> None:
        """SIGTERM."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        """The exit code, once it has ended."""
        code = self._process.wait(timeout=START_TIMEOUT_S)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            self._lines.put(line)
        self._lines.put("")

    def _wait_for_url(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            line = self._lines.get(timeout=START_TIMEOUT_S)
            if " at http://" in line:
                return line.rsplit(" at ", 1)[1].strip()
            if not line:
                break
        self.kill()
        raise AssertionError(f"the server did not start:\n{self.output}")


@contextlib.contextmanager
def server_process(folder: Path, *flags: str, database_url: str | None = None) -> Iterator[Process]:
    process = Process(folder, *flags, database_url=database_url)
    try:
        yield process
    finally:
        if process._process.poll() is None:
            process.kill()
