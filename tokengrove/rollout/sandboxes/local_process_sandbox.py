"""A sandbox of processes on this machine, in its own folder.

It separates jobs and leaves nothing behind, but does not confine a malicious agent, as a container does.
"""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.sandboxes.cleaning import MARK, clean, kill_marked
from tokengrove.rollout.sandboxes.local_process import LocalProcess
from tokengrove.rollout.sandboxes.sandbox import DOWNLOAD_BYTES, Command, Sandbox, too_large
from tokengrove.rollout.sandboxes.sandbox_folders import new_folder
from tokengrove.rollout.threads import in_thread

KEPT = ("PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR")
"""The variables of the caller that commands get."""
_USED = {"env", "startup_timeout"}
_log = logging.getLogger(__name__)


class LocalProcessSandbox(Sandbox):
    """A temporary folder of this machine with the working folder, HOME and TMPDIR of its commands.

    Of the caller's variables, commands get only those in KEPT, so no keys. `python` is the interpreter of this process.

    `stop` kills the processes: on Linux, all processes that were started here, except those that have both cleared
    their environment and left the folder; on other systems, those in the process group of a command. It also happens
    without a call, when the object is collected or this process ends or is killed.
    """

    local = True

    def __init__(self, environment: Mapping[str, Any]) -> None:
        super().__init__(environment)
        self._folder: Path | None = None
        self._mark = ""
        self._processes: list[LocalProcess] = []
        self._finalizer: weakref.finalize[..., Any] | None = None
        _say_unused(environment)

    @property
    def folder(self) -> Path:
        """The folder of the sandbox, with `work`, `home`, `tmp` and further files of its user."""
        return self._started()

    @property
    def mark(self) -> str:
        """The value of the variable MARK in all processes of the sandbox."""
        return self._mark

    @property
    def working_folder(self) -> str:
        return str(self._started() / "work")

    @property
    def scratch_folder(self) -> str:
        return str(self._started() / "tmp")

    async def start(self) -> None:
        self._folder, self._mark = new_folder()
        self._finalizer = weakref.finalize(self, _clean, self._folder, self._mark, self._processes)

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> LocalProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {**self._variables(), **(env or {}), MARK: self._mark}
        process = LocalProcess(words, self.working_folder, variables, stdin, output)
        self._processes.append(process)
        return process

    async def upload(self, path: str, content: bytes) -> None:
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    async def download(self, path: str) -> bytes:
        file = self._file(path)
        if not file.is_file():  # reading a pipe would wait for a writer
            raise FileNotFoundError(path)
        with file.open("rb") as opened:
            content = opened.read(DOWNLOAD_BYTES + 1)
        if len(content) > DOWNLOAD_BYTES:
            raise too_large(path)
        return content

    def address(self, port: int) -> str | None:
        return f"http://127.0.0.1:{port}"

    async def kill_all(self) -> None:
        await in_thread(partial(_kill, self._mark, self.folder, self._processes), "tokengrove-sandbox-kill")

    async def stop(self) -> None:
        if self._finalizer is not None:
            await in_thread(self._finalizer, "tokengrove-sandbox-stop")

    def _started(self) -> Path:
        if self._folder is None:
            raise InvalidRequest("the sandbox has not been started")
        return self._folder

    def _file(self, path: str) -> Path:
        file = (Path(self.working_folder) / path).resolve()
        if not file.is_relative_to(self._started()):
            raise InvalidRequest(f"{path!r} is outside of the sandbox's folder; give a path below it", param="path")
        return file

    def _variables(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        own = {str(name): str(value) for name, value in dict(self.environment.get("env") or {}).items()}
        home = str(self._started() / "home")
        return {**kept, "PATH": path, "HOME": home, "TMPDIR": self.scratch_folder, **own}


def _kill(mark: str, folder: Path, processes: list[LocalProcess]) -> None:
    for process in processes:
        process.kill()
    kill_marked(mark, str(folder))


def _clean(folder: Path, mark: str, processes: list[LocalProcess]) -> None:
    for process in processes:
        process.kill()
    clean(str(folder), mark)


_said: set[str] = set()


def _say_unused(environment: Mapping[str, Any]) -> None:
    """Log once for each key of `environment` that this sandbox does not use."""
    unused = sorted(str(name) for name, value in environment.items() if value and name not in _USED | _said)
    if unused:
        _said.update(unused)
        _log.info("environment: %s: not used by LocalProcessSandbox", ", ".join(unused))
