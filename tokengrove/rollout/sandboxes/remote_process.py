"""A command in a remote sandbox. It runs on its own there, so no connection has to outlive it.

Its folder in the sandbox has its program (`run`), its output (`out`), its process id (`pid`) and in the end its exit
code (`exit`). All scripts can be repeated, since a call may have succeeded although its answer was lost.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from tokengrove.rollout.sandboxes.cleaning import MARK
from tokengrove.rollout.sandboxes.command_sandbox import KILL
from tokengrove.rollout.sandboxes.local_process import KEPT_BYTES, OUTPUT_BYTES
from tokengrove.rollout.sandboxes.sandbox import CommandResult, SandboxProcess

Execute = Callable[[str], Awaitable[str]]
"""Runs a script in the sandbox and returns what it prints."""

_LOOKS = 50  # of 0.2 s: a request of ten seconds, which no gateway cuts off
_RUN = """
if mkdir "$d/started" 2>/dev/null; then
  session=$(command -v setsid)
  : >"$d/out"
  nohup $session /bin/sh -c '/bin/sh "$0/run" <"$1" >"$0/out" 2>&1
echo $? >"$0/code"; mv "$0/code" "$0/exit"' "$d" "$stdin" >/dev/null 2>&1 </dev/null &
  echo $! >"$d/pid"
fi
cat "$d/pid"
"""
_WATCH = """
look=0
while [ ! -e "$d/exit" ] && [ $look -lt $looks ]; do
  kill -0 "$(cat "$d/pid")" 2>/dev/null || { sleep 0.2; [ -e "$d/exit" ] || echo -9 >"$d/exit"; break; }
  [ $(($(wc -c <"$d/out") - from)) -gt $most ] && break
  sleep 0.2 2>/dev/null || sleep 1
  look=$((look + 1))
done
code=$(cat "$d/exit" 2>/dev/null)
size=$(wc -c <"$d/out")
[ $((size - from)) -gt $room ] && from=$((size - most))
[ $from -lt 0 ] && from=0
echo "${code:-none} $size $from"
tail -c "+$((from + 1))" "$d/out" | head -c $most | base64
"""
"""Waits for the end or for more output, and prints the exit code, the size and the next part of the output.

If more than `room` bytes are left, all but the last `most` bytes are skipped.
"""


def starting(folder: str, stdin: str) -> str:
    """The script that starts the program in `folder` with the file `stdin` as its input, and prints its process id."""
    return f"d={shlex.quote(folder)} stdin={shlex.quote(stdin)}\n{_RUN}"


def killing(parent: str, mark: str, folder: str) -> str:
    """The script that kills the processes with this mark. `folder`: whose ends are noted, a pattern below `parent`."""
    kill = shlex.join(["/bin/sh", "-c", KILL, f"{MARK}={mark}"])
    return f'{kill}\nfor d in {shlex.quote(parent)}/{folder}; do [ -e "$d/exit" ] || echo -9 >"$d/exit"; done'


class RemoteProcess(SandboxProcess):
    """A command that was started in `folder`. `kill_it` kills its processes there."""

    def __init__(
        self, pid: int, folder: str, execute: Execute, kill_it: Callable[[], Awaitable[None]], output: Path | None
    ) -> None:
        self.pid = pid
        self._folder, self._execute, self._kill_it, self._file = folder, execute, kill_it, output
        self._tail = bytearray()
        self._kept = 0
        self.following = asyncio.ensure_future(self._follow())
        self.following.add_done_callback(_seen)
        self._killing: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        return self.following.done()

    @property
    def output(self) -> str:
        return bytes(self._tail).decode(errors="replace")

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        try:
            async with asyncio.timeout(timeout_s):
                return CommandResult(await asyncio.shield(self.following), self.output)
        except TimeoutError:
            await self._kill_it()
            return CommandResult(await asyncio.shield(self.following), self.output, timed_out=True)

    def kill(self) -> None:
        if not self.ended and self._killing is None:
            self._killing = asyncio.ensure_future(self._kill_it())
            self._killing.add_done_callback(_seen)

    def forget(self) -> None:
        """Stop following the command, whose sandbox is deleted."""
        self.following.cancel()
        if self._killing is not None:
            self._killing.cancel()

    async def _follow(self) -> int:
        """Read the output until the command has ended; return its exit code."""
        at = 0
        while True:
            room = OUTPUT_BYTES if self._file is None else max(KEPT_BYTES - self._kept, OUTPUT_BYTES)
            values = f"d={shlex.quote(self._folder)} from={at} most={OUTPUT_BYTES} room={room} looks={_LOOKS}"
            head, _, content = (await self._execute(f"{values}\n{_WATCH}")).partition("\n")
            code, size, begun = head.split()
            part = base64.b64decode(content)
            at = int(begun) + len(part)
            self._add(part)
            if code != "none" and at >= int(size):
                return int(code)

    def _add(self, part: bytes) -> None:
        self._tail += part
        del self._tail[:-OUTPUT_BYTES]
        if self._file is not None and part and self._kept < KEPT_BYTES:
            with self._file.open("ab") as file:
                file.write(part[: KEPT_BYTES - self._kept])
            self._kept += len(part)


def _seen(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception, which `wait` raises, so that asyncio does not log it."""
    if not task.cancelled():
        task.exception()
