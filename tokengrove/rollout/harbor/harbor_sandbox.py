"""The environment of a Harbor task: a sandbox with the absolute paths that the task's scripts use.

`/tests`, `/solution` and `/logs` belong to this environment alone. `stop` ends its processes.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tokengrove.rollout.harbor.archives import pack, unpack
from tokengrove.rollout.harbor.task_config import Environment
from tokengrove.rollout.sandboxes import CommandSandbox
from tokengrove.rollout.sandboxes.sandbox import DOWNLOAD_BYTES
from tokengrove.rollout.threads import in_thread

TESTS, SOLUTION, LOGS = "/tests", "/solution", "/logs"
AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS = f"{LOGS}/agent", f"{LOGS}/verifier", f"{LOGS}/artifacts"


@dataclass(frozen=True, slots=True)
class Blueprint:
    """The parts of an environment.

    `table`: its section of the configuration. `build`: the folder with its Dockerfile. `env`: its variables with their
    values. `task`: the task's folder, which processes in the environment must not see.
    """

    table: Environment
    build: Path
    env: Mapping[str, str]
    task: Path


class HarborSandbox(CommandSandbox):
    """A subclass builds the environment in `start`. Commands run in `working_folder` with the blueprint's variables.

    `user`: the user of the commands, if the environment has several users; None: the environment's default.
    """

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__({"env": dict(blueprint.env)})
        self.blueprint = blueprint
        self.user: str | int | None = None

    async def put(self, entries: Iterable[tuple[Path, str]], mode: int | None = None) -> None:
        """Copy files and folders of this machine to absolute paths in the environment, and overwrite existing files."""
        with tempfile.TemporaryFile() as archive:
            await in_thread(lambda: pack(entries, archive, mode), "tokengrove-harbor-put")
            archive.seek(0)
            await self._piped(["tar", "-xf", "-", "-C", "/", "--no-same-owner"], stdin=archive)

    async def get(self, source: str, target: Path, exclude: Iterable[str] = ()) -> None:
        """Copy the contents of a folder of the environment, or a file, to `target`, except paths that match `exclude`.

        Raises FileNotFoundError, and ValueError for more than DOWNLOAD_BYTES or an invalid archive.
        """
        name = shlex.quote(source.rstrip("/") or "/")
        found = await self.run(f"if test -d {name}; then exit 0; elif test -f {name}; then exit 3; else exit 4; fi")
        if found.exit_code not in (0, 3):
            raise FileNotFoundError(source)
        folder = found.exit_code == 0
        what = f"-C {name} ." if folder else f'-C "$(dirname {name})" "$(basename {name})"'
        without = " ".join(f"--exclude={shlex.quote(each)}" for each in exclude)
        limit = DOWNLOAD_BYTES + 1
        with tempfile.TemporaryFile() as archive:
            words = ["/bin/sh", "-c", f"tar -cf - {without} {what} 2>/dev/null | head -c {limit}"]
            await self._piped(words, stdout=archive)
            if archive.seek(0, 2) >= limit:
                raise ValueError(f"{source} has more than {DOWNLOAD_BYTES} bytes")
            archive.seek(0)
            place = (target, None) if folder else (target.parent, target.name)
            await in_thread(lambda: unpack(archive, *place), "tokengrove-harbor-get")

    async def empty(self, *folders: str) -> None:
        """Replace folders with empty folders that all users can write to."""
        names = shlex.join(folders)
        await self._done(f"rm -rf {names} && mkdir -p {names} && chmod 777 {names}")

    def _client_variables(self) -> dict[str, str]:
        """The variables of the program on this machine that enters the environment."""
        return dict(os.environ)

    async def _piped(self, words: list[str], stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> None:
        """Run a command in the environment between two files of this machine. Raises RuntimeError if it fails."""
        process = await asyncio.create_subprocess_exec(
            *self.command_line(words, {}),
            env=self._client_variables(),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
            stdout=asyncio.subprocess.DEVNULL if stdout is None else stdout,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, told = await process.communicate()
        except BaseException:
            process.kill()
            await process.wait()
            raise
        if process.returncode:
            raise RuntimeError(f"{words[0]} exited with {process.returncode}: {told.decode(errors='replace')[-500:]}")
