"""A command on this machine. Its output is read until no process can write to it; the end of the output is kept."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from tokengrove.rollout.sandboxes.sandbox import CommandResult, SandboxProcess

OUTPUT_BYTES = 256 * 1024
KEPT_BYTES = 64 * 2**20
"""The maximum size of an output in a file, so that endless output does not fill the disk."""
_LOOK_MS = 50


class LocalProcess(SandboxProcess):
    """A command in its own process session. Output of processes that it leaves running is read and discarded."""

    def __init__(
        self,
        command: Sequence[str],
        folder: str,
        env: Mapping[str, str],
        stdin: bytes = b"",
        output: Path | None = None,
    ) -> None:
        """Start the command. Raises OSError if the program does not exist or the file cannot be written.

        `stdin`: its whole input. `output`: a file to which its output is appended, up to KEPT_BYTES.
        """
        with _kept(output) as self._file, _readable(stdin) as source:
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env=dict(env),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid
        self._lock = threading.Lock()
        self._tail = bytearray()
        self._room = KEPT_BYTES
        self._end: Future[int] = Future()
        threading.Thread(target=self._follow, name=f"tokengrove-sandbox-{self.pid}", daemon=True).start()

    @property
    def ended(self) -> bool:
        return self._end.done()

    @property
    def output(self) -> str:
        return bytes(self._tail).decode(errors="replace")

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        try:
            async with asyncio.timeout(timeout_s):
                code = await asyncio.shield(asyncio.wrap_future(self._end))
        except TimeoutError:
            self.kill()
            code = await asyncio.shield(asyncio.wrap_future(self._end))
            return CommandResult(code, self.output, timed_out=True)
        return CommandResult(code, self.output)

    def kill(self) -> None:
        with self._lock:  # the process id is not reused before the process is waited for
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)

    def _follow(self) -> None:
        """Read the output to its end; set the result as soon as the process ends."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe, _Exit(self.pid) as exit:
            os.set_blocking(pipe.fileno(), False)
            poll = select.poll()
            poll.register(pipe, select.POLLIN)
            exit.register(poll)
            reading = True
            while reading or not self.ended:
                poll.poll(None if self.ended else exit.look_ms)
                over = not self.ended and self._is_over()
                if reading and not self._read(pipe.fileno()):
                    reading = False
                    poll.unregister(pipe)
                if over:
                    exit.unregister(poll)
                    if self._file is not None:
                        self._file.close()
                    self._end.set_result(self._process.returncode)

    def _is_over(self) -> bool:
        with self._lock:
            return self._process.poll() is not None

    def _read(self, fd: int) -> bool:
        """Read the available output; return whether more may follow."""
        try:
            while data := os.read(fd, 65536):
                if not self.ended:
                    self._tail += data
                    del self._tail[:-OUTPUT_BYTES]
                    self._keep(data)
        except BlockingIOError:
            return True
        return False

    def _keep(self, data: bytes) -> None:
        """Append data to the file, up to the maximum size and until a write fails."""
        if self._file is not None and self._room > 0:
            try:
                self._file.write(data[: self._room])
                self._room -= len(data)
            except OSError:
                self._room = 0


@contextmanager
def _kept(path: Path | None) -> Iterator[IO[bytes] | None]:
    """The open file, which is closed only if the block fails."""
    file = None if path is None else path.open("ab", buffering=0)
    try:
        yield file
    except BaseException:
        if file is not None:
            file.close()
        raise


@contextmanager
def _readable(content: bytes) -> Iterator[IO[bytes] | int]:
    """The input of a process, as a file, so that it need not be written while the process runs."""
    if not content:
        yield subprocess.DEVNULL
        return
    with tempfile.TemporaryFile() as file:
        file.write(content)
        file.seek(0)
        yield file


class _Exit:
    """Wakes a poll when a child has ended: by a process descriptor on Linux, elsewhere by short intervals."""

    def __init__(self, pid: int) -> None:
        self._fd: int | None = None
        with contextlib.suppress(AttributeError, OSError):
            self._fd = os.pidfd_open(pid)
        self.look_ms = _LOOK_MS if self._fd is None else None

    def __enter__(self) -> _Exit:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd is not None:
            os.close(self._fd)

    def register(self, poll: select.poll) -> None:
        if self._fd is not None:
            poll.register(self._fd, select.POLLIN)

    def unregister(self, poll: select.poll) -> None:
        if self._fd is not None:
            poll.unregister(self._fd)
