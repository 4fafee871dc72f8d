"""The program that keeps an environment running. When its stdin ends, it and all processes in the environment end.

So nothing is left of an environment if its owner is killed.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from typing import IO

from tokengrove.rollout.threads import in_thread

_ENDS_S = 10.0


class Holder:
    """The program `command` prints one line when it is ready, or `error: ...`, or ends without a line."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the program. Raises OSError if it does not exist."""
        self._process = subprocess.Popen(
            list(command),
            env=dict(env),
            cwd="/",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    async def ready(self) -> str:
        """Wait for the line and return it. Raises RuntimeError with the error."""
        line = await in_thread(self._line, "tokengrove-harbor-start")
        if not line or line.startswith("error: "):
            raise RuntimeError(line.removeprefix("error: ") or self._told())
        return line

    def close(self) -> None:
        """Close the program's stdin and wait for its end; kill it after ten seconds. May be called twice."""
        self._close(self._process.stdin)
        try:
            self._process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):  # only now: closing waits for readers of the pipe
            self._close(pipe)

    @staticmethod
    def _close(pipe: IO[str] | None) -> None:
        if pipe is not None:
            with contextlib.suppress(OSError, ValueError):
                pipe.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        try:
            return self._process.stdout.readline().strip()
        except ValueError:  # closed meanwhile
            return ""

    def _told(self) -> str:
        """The end of the stderr of a program that ended without a line."""
        assert self._process.stderr is not None
        with contextlib.suppress(ValueError, OSError):
            if text := self._process.stderr.read().strip():
                return text[-2000:]
        return "it ended without output"
