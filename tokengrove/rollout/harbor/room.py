"""A Harbor environment without containers: a room on this machine, made with Linux's user namespaces.

It needs neither root nor a daemon. Its programs are those of this machine. It separates tasks and leaves nothing
behind, but like other local sandboxes it does not confine a malicious agent.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor import room_init
from tokengrove.rollout.harbor.harbor_sandbox import (
    AGENT_LOGS,
    ARTIFACTS,
    LOGS,
    SOLUTION,
    TESTS,
    VERIFIER_LOGS,
    Blueprint,
    HarborSandbox,
)
from tokengrove.rollout.harbor.holder import Holder
from tokengrove.rollout.harbor.recipe import Recipe, RunLines, Say
from tokengrove.rollout.sandboxes.cleaning import MARK, clean
from tokengrove.rollout.sandboxes.local_process import LocalProcess
from tokengrove.rollout.sandboxes.sandbox import Command
from tokengrove.rollout.sandboxes.sandbox_folders import new_folder
from tokengrove.rollout.threads import in_thread

_HIDDEN = ("/root", "/tmp", "/run", "/var/tmp", "/app", TESTS, LOGS, SOLUTION)
_KEPT = ("LANG", "LC_ALL", "LC_CTYPE", "TZ", "SSL_CERT_FILE", "SSL_CERT_DIR")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENTER = ("--user", "--mount", "--pid", "--ipc", "--preserve-credentials")
_KILL = "look=0; while kill -9 -1 2> /dev/null && [ $look -lt 500 ]; do look=$((look + 1)); sleep 0.01; done"
"""Kills all but the first process, until none is left: a killed process may exist for a moment."""


class Room(HarborSandbox):
    """A room. `visible`: further paths to show, read-only, from folders that a room hides (homes, /tmp, /app).

    The folders of PATH and of this Python are always visible.
    """

    local = True

    def __init__(
        self, blueprint: Blueprint, run_lines: RunLines = "run", visible: Iterable[str] = (), say: Say = print
    ) -> None:
        """Raises BadTask for an invalid Dockerfile, and ConfigurationError on systems other than Linux or without
        `nsenter`.
        """
        super().__init__(blueprint)
        self._recipe = Recipe(blueprint.build, run_lines, say)
        self._visible = tuple(visible)
        self._enter = [_nsenter()]
        self._base = _base_variables()
        self._finalizer: weakref.finalize[..., Any] | None = None
        self._mark = ""
        self._workdir = "/"

    @property
    def working_folder(self) -> str:
        return self._workdir

    async def start(self) -> None:
        folder, self._mark = new_folder()
        order = folder / "order.json"
        hidden = {*_HIDDEN, str(Path.home()), tempfile.gettempdir(), str(self.blueprint.task)}
        kept = _kept(self._visible)
        order.write_text(json.dumps({"folder": str(folder), "hidden": sorted(hidden), "kept": kept}))
        command = [sys.executable, "-E", "-S", room_init.__file__, str(order)]
        holder = Holder(command, {"PATH": _PATH, MARK: self._mark})
        self._finalizer = weakref.finalize(self, _clean, holder, folder, self._mark)
        try:
            pid = await holder.ready()
        except RuntimeError as error:
            raise ConfigurationError(f"no room can be made for Harbor tasks: {error}; use sandbox=docker") from None
        self._enter = [_nsenter(), "--target", pid, *_ENTER, "--"]
        await self._build()

    def command_line(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        return [*self._enter, "env", *(f"{name}={value}" for name, value in env.items()), *self._inside(words)]

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> LocalProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        return LocalProcess([*self._enter, *self._inside(words)], "/", self._all(env or {}), stdin, output)

    def address(self, port: int) -> str | None:
        return f"http://127.0.0.1:{port}"

    async def kill_all(self) -> None:
        await self.run(["/bin/sh", "-c", _KILL])

    async def stop(self) -> None:
        if self._finalizer is not None:
            await in_thread(self._finalizer, "tokengrove-room-stop")

    def _inside(self, words: Sequence[str]) -> list[str]:
        return ["/bin/sh", "-c", 'cd "$0" && exec "$@"', self._workdir, *words]

    def _client_variables(self) -> dict[str, str]:
        """No variables of the caller: a process of the room could read its keys before the program is executed."""
        return {**self._base, MARK: self._mark}

    async def _build(self) -> None:
        await self.empty(TESTS, AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS)
        await self._recipe.follow(self, self._base)
        self._workdir = self.blueprint.table.workdir or self._recipe.workdir
        await self._done(f"mkdir -p {shlex.quote(self._workdir)}")

    def _all(self, env: Mapping[str, str]) -> dict[str, str]:
        return {**self._base, **self._recipe.env, **self.blueprint.env, **env, MARK: self._mark}


def _clean(holder: Holder, folder: Path, mark: str) -> None:
    holder.close()
    clean(str(folder), mark)


def _nsenter() -> str:
    found = shutil.which("nsenter")
    if sys.platform != "linux" or found is None:
        raise ConfigurationError(
            "Harbor tasks without containers need Linux and `nsenter` of util-linux; use sandbox=docker"
        )
    return found


def _base_variables() -> dict[str, str]:
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", _PATH), _PATH])
    return {**kept, "PATH": path, "HOME": "/root", "TMPDIR": "/tmp"}


def _kept(visible: Iterable[str]) -> list[str]:
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent)]
    programs = [path for each in os.environ.get("PATH", "").split(os.pathsep) if each for path in _with_libraries(each)]
    return sorted({os.path.abspath(os.path.expanduser(each)) for each in (*programs, *python, *visible) if each})


def _with_libraries(folder: str) -> list[str]:
    """A folder of programs, and the usual folder of the targets of its links: npm packages, libraries of a prefix."""
    path = Path(folder)
    if path.parts[-2:] == ("node_modules", ".bin"):
        return [str(path.parent)]
    return [folder, str(path.parent / "lib")] if path.name == "bin" else [folder]
