"""The working folder of one episode and the sandbox of its commands. Both are removed at the end."""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.command.addresses import addresses_of
from tokengrove.rollout.command.checkout import add_clone, add_worktree
from tokengrove.rollout.command.container import ContainerSandbox
from tokengrove.rollout.command.failures import SHOWN, how_it_ended
from tokengrove.rollout.command.placeholders import Placeholders
from tokengrove.rollout.command.transfer import fetch, send
from tokengrove.rollout.command.variables import (
    codex_configuration,
    command_variables,
    inherited_variables,
    passed_variables,
    tool_variables,
)
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.episodes import Episode
from tokengrove.rollout.sandboxes import LocalProcessSandbox, Sandbox
from tokengrove.rollout.sandboxes.by_name import sandbox_class
from tokengrove.rollout.sandboxes.local_process import LocalProcess
from tokengrove.rollout.threads import in_thread

_GIT_SETTINGS = "[user]\n\tname = agent\n\temail = agent@localhost\n[safe]\n\tdirectory = *\n"
"""Gives commits an author, and allows worktrees of a repository that belongs to another user."""
_log = logging.getLogger(__name__)


class Workplace:
    """The working folder and sandbox of an episode, between `open` and `close`.

    `host` has the folder on this machine. Commands run in `sandbox`: `host`, a container, or a remote sandbox, to which
    the folder is copied.
    """

    def __init__(self, options: CommandOptions, episode: Episode) -> None:
        self.options, self.episode = options, episode
        self.host = LocalProcessSandbox({})
        self.sandbox: Sandbox = self.host
        self.values = Placeholders({}, {}, None)
        self._stop_needed = False
        self._task_folder: str | None = None
        """The folder of the task's files as the command sees it; None if it does not."""

    @property
    def folder(self) -> Path:
        """The working folder on this machine."""
        return self.host.folder / "work"

    @property
    def home(self) -> Path:
        """HOME on this machine."""
        return self.host.folder / "home"

    async def open(self) -> None:
        """Make the folders, start the container or sandbox and run the setup.

        Raises InvalidRequest or OSError if that fails, and SandboxLost if a remote sandbox cannot be started.
        """
        await self.host.start()
        self._task_folder = str(self.host.folder / "task")
        home = str(self.home)
        if self.options.sandbox is not None:
            self.sandbox = sandbox_class(self.options.sandbox)(self._sandbox_args())
            await self.sandbox.start()
            self._task_folder = f"{self.sandbox.scratch_folder}/tokengrove-task"
            home = (await self.sandbox.run('printf %s "$HOME"')).output
        self.values = self._values(home, container=f"tokengrove-{self.episode.session.session_id}")
        # A thread cannot be stopped, and files that it makes after the folder was removed would remain.
        await to_the_end(in_thread(self._fill, "tokengrove-command-folder"))
        if self.options.sandbox is not None:
            folders = {"work": self.folder, "home": self.home, "task": self.host.folder / "task"}
            targets = {"work": self.sandbox.working_folder, "home": home, "task": self._task_folder}
            await send(folders, self.sandbox, targets)
        self._stop_needed = True
        if self.options.container_start is not None:
            await self._here("container_start", self.options.container_start)
        if self.options.container is not None:
            prefix = self.values.words(shlex.split(self.options.container))
            self.sandbox = ContainerSandbox(prefix, self.values.values["workdir"], self.host)
            self._task_folder = None
        if self.options.setup is not None:
            await self._set_up(self.options.setup)

    async def fetch(self) -> None:
        """Copy the working folder of a remote sandbox to this machine, where a verifier reads it.

        Raises OSError or ValueError if that fails.
        """
        if self.options.sandbox is not None:
            await fetch(self.sandbox, self.sandbox.working_folder, self.folder)
            here = {**self.values.values, "workdir": str(self.folder), "home": str(self.home)}
            self.values = replace(self.values, values=here)

    async def close(self) -> None:
        """Kill all processes, stop the container and remove the folders. May be called twice."""
        try:
            if self.sandbox is not self.host:
                sandbox, self.sandbox = self.sandbox, self.host
                await sandbox.stop()
            if self._stop_needed and self.options.container_stop is not None:
                self._stop_needed = False
                await self._here("container_stop", self.options.container_stop)
        except (InvalidRequest, OSError) as error:
            _log.warning("session %s: its container may still exist: %s", self.episode.session.session_id, error)
        finally:
            await self.host.stop()

    def variables(self) -> dict[str, str]:
        """The environment of the command. In a container, PATH, HOME and language are the container's own."""
        options = self.options
        own = {name: self.values.fill(value) for name, value in options.env.items()}
        passed = passed_variables(options.pass_env)
        session = command_variables(self.episode, model=options.model, server_url=options.server_url)
        if self.sandbox is not self.host:
            return {**session, **self._files(), **passed, **own}
        return {**tool_variables(), **inherited_variables(), **session, **self._files(), **passed, **own}

    def _files(self) -> dict[str, str]:
        """Variables with the paths of the files of the task and its prompt."""
        if self._task_folder is None:
            return {}
        found = {"TOKENGROVE_TASK_FILE": f"{self._task_folder}/task.json"}
        if self.values.prompt is not None:
            found["TOKENGROVE_PROMPT_FILE"] = f"{self._task_folder}/prompt.txt"
        return found

    def _sandbox_args(self) -> dict[str, Any]:
        values = Placeholders.of(self.episode, workdir="", home="", model=self.options.model)
        given = self.options.sandbox_args.items()
        return {name: values.fill(value) if isinstance(value, str) else value for name, value in given}

    def _values(self, home: str, container: str) -> Placeholders:
        options = self.options
        folder = str(self.folder) if options.sandbox is None else self.sandbox.working_folder
        own_names = Placeholders.of(self.episode, workdir=folder, home=home, container=container, model=options.model)
        workdir = folder if options.container_workdir is None else own_names.fill(options.container_workdir)
        return Placeholders.of(
            self.episode,
            workdir=workdir,
            home=home,
            model=options.model,
            prompt=options.prompt,
            server_url=options.server_url,
            container=container,
        )

    def _fill(self) -> None:
        """Fill the working folder and HOME, and write the files of the task."""
        options = self.options
        if options.copy is not None:
            _copy(self.values.path(options.copy), self.folder)
        commit = self.values.fill(options.commit or "HEAD")
        if options.worktree is not None:
            add_worktree(_whole(self.values.path(options.worktree)), commit, self.folder)
        if options.clone is not None:
            add_clone(_whole(self.values.path(options.clone)), commit, self.folder, whole=options.sandbox is not None)
        if options.home is not None:
            _copy(self.values.path(options.home), self.home)
        else:
            self._fill_home()
        for path, text in options.files.items():
            self._write(self.values.fill(path), self.values.fill(text))
        (folder := self.host.folder / "task").mkdir()
        write_task(folder, self.episode.task.data, self.values.prompt)

    def _fill_home(self) -> None:
        addresses = addresses_of(self.episode.session, self.options.server_url)
        (self.home / ".gitconfig").write_text(_GIT_SETTINGS)
        (self.home / ".codex").mkdir()
        (self.home / ".codex" / "config.toml").write_text(codex_configuration(addresses, self.options.model), "utf-8")

    def _write(self, path: str, text: str) -> None:
        start = self.home if path.startswith("~/") else self.folder
        file = (start / path.removeprefix("~/")).resolve()
        if not file.is_relative_to(start):
            raise InvalidRequest(f"{path!r} is outside of the working folder; give a path below it", param="files")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")

    async def _set_up(self, command: str) -> None:
        variables = {**tool_variables(), **inherited_variables()} if self.sandbox is self.host else {}
        script, values = self.values.script(command)
        told = await self.sandbox.run(script, {**variables, **values})
        if told.exit_code:
            raise InvalidRequest(f"setup {how_it_ended(told)}: {told.output[-SHOWN:].strip()}", param="setup")

    async def _here(self, name: str, command: str) -> None:
        """Run a command of the user on this machine, with all variables of this process."""
        script, values = self.values.script(command)
        process = LocalProcess(["/bin/sh", "-c", script], str(self.folder), {**os.environ, **values})
        try:
            told = await process.wait()
        finally:
            process.kill()
        if told.exit_code:
            raise InvalidRequest(f"{name} {how_it_ended(told)}: {told.output[-SHOWN:].strip()}", param=name)


def write_task(folder: Path, data: Mapping[str, object], prompt: str | None) -> None:
    """Write `task.json`, the task's row, and `prompt.txt` (if there is a prompt) into a folder."""
    (folder / "task.json").write_text(json.dumps(dict(data), ensure_ascii=False, default=str), "utf-8")
    if prompt is not None:
        (folder / "prompt.txt").write_text(prompt, "utf-8")


def _whole(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _copy(source: str, target: Path) -> None:
    """Copy a folder; links are copied as links. Raises InvalidRequest for a source that cannot be copied."""
    folder = Path(_whole(source))
    if not folder.is_dir():
        raise InvalidRequest(f"{source} is not a folder", param="copy")
    if (folder / ".git").is_file():
        raise InvalidRequest(
            f"{source} is a worktree or submodule, and its copies would share its repository: "
            "give the repository as --worktree or --clone",
            param="copy",
        )
    shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)
