"""A sandbox that a program of this machine enters: `docker exec`, `kubectl exec`, `ssh`."""

from __future__ import annotations

import base64
import os
import shlex
import uuid
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.rollout.sandboxes.cleaning import MARK
from tokengrove.rollout.sandboxes.local_process import LocalProcess
from tokengrove.rollout.sandboxes.sandbox import DOWNLOAD_BYTES, Command, CommandResult, Sandbox, too_large

_PART = 48 * 1024  # fits into a command line and into the stored end of an output
KILL = r"""
if printf x | grep -qz x 2>/dev/null; then
  marked() { grep -lsz "^$0" /proc/[0-9]*/environ; }
else  # the grep of busybox
  marked() { for each in /proc/[0-9]*/environ; do tr '\0' '\n' <"$each" | grep -q "^$0" && echo "$each"; done; }
fi
for look in 1 2 3 4 5 6 7 8 9; do
  found=
  for file in $(marked); do
    process=${file#/proc/}
    kill -9 "${process%/environ}" && found=1
  done
  test -z "$found" && break
done 2>/dev/null
:"""
"""Kills all processes with an environment variable that begins with its argument, on systems with /proc, such as Linux.
"""


class CommandSandbox(Sandbox):
    """A subclass implements `start`, `stop`, `working_folder`, and `command_line`, which runs a command in the sandbox.

    Files are also transferred by commands, so the sandbox needs a shell, `base64`, `head` and `tail`. To kill a command
    ends only its program on this machine; its processes in the sandbox end with `kill_all` or with the sandbox. If they
    must end earlier, wrap the command in `timeout`.
    """

    def __init__(self, environment: Mapping[str, Any]) -> None:
        super().__init__(environment)
        self._mark = uuid.uuid4().hex
        self._started: list[LocalProcess] = []

    @abstractmethod
    def command_line(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        """The program of this machine, with its arguments, that runs `words` in the sandbox with these variables."""

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> LocalProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        own = {str(name): str(value) for name, value in (self.environment.get("env") or {}).items()}
        line = self.command_line(words, {**own, **(env or {}), MARK: self._mark})
        process = self._here(line, stdin, output)
        self._started = [*(each for each in self._started if not each.ended), process]
        return process

    async def kill_all(self) -> None:
        for process in self._started:
            process.kill()
        await self._here(self.command_line(["/bin/sh", "-c", KILL, f"{MARK}={self._mark}"], {})).wait()

    async def upload(self, path: str, content: bytes) -> None:
        name = shlex.quote(path)
        await self._done(f'mkdir -p "$(dirname {name})" && : > {name}')
        for at in range(0, len(content), _PART):
            part = base64.b64encode(content[at : at + _PART]).decode()
            await self._done(f"printf %s {part} | base64 -d >> {name}")

    async def download(self, path: str) -> bytes:
        name = shlex.quote(path)
        parts: list[bytes] = []
        if (await self.run(f"test -f {name}")).exit_code:
            raise FileNotFoundError(path)
        while not parts or len(parts[-1]) == _PART:
            told = await self._done(f"tail -c +{len(parts) * _PART + 1} {name} | head -c {_PART} | base64")
            parts.append(base64.b64decode(told.output))
            if len(parts) * _PART > DOWNLOAD_BYTES:
                raise too_large(path)
        return b"".join(parts)

    async def on_this_machine(self, command: Sequence[str]) -> CommandResult:
        """Run a program on this machine, such as the program that starts a container. Raises RuntimeError if it fails.

        If this is cancelled, the program is killed.
        """
        process = self._here(command)
        try:
            return _checked(await process.wait())
        finally:
            process.kill()

    async def _done(self, command: str) -> CommandResult:
        return _checked(await self.run(command))

    def _here(self, command: Sequence[str], stdin: bytes = b"", output: Path | None = None) -> LocalProcess:
        return LocalProcess(list(command), os.getcwd(), os.environ, stdin, output)


def _checked(result: CommandResult) -> CommandResult:
    if result.exit_code:
        raise RuntimeError(f"the command exited with {result.exit_code}: {result.output[-500:].strip()}")
    return result
