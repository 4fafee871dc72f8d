"""A container or remote machine, entered through a command prefix such as `docker run ... IMAGE`.

In a prefix, `{variables}` (for docker and podman) is replaced with `-e NAME` for each variable, and the values are in
the environment of the prefix's program. Otherwise the command begins with `env NAME=VALUE ...`. `{command}` in a prefix
is replaced with the whole command as one shell-quoted string, for `ssh`; otherwise the words follow the prefix.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from tokengrove.rollout.command.variables import inherited_variables
from tokengrove.rollout.sandboxes import Command, CommandSandbox, LocalProcessSandbox
from tokengrove.rollout.sandboxes.cleaning import MARK
from tokengrove.rollout.sandboxes.command_sandbox import KILL
from tokengrove.rollout.sandboxes.local_process import LocalProcess

_VARIABLES, _COMMAND = "{variables}", "{command}"
_CONTAINERS = ("docker", "podman", "nerdctl")
_CLIENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_CONTAINERS, ("HOME", "DOCKER_*", "CONTAINER*", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME")),
    "kubectl": ("HOME", "KUBECONFIG"),
    "ssh": ("HOME", "SSH_AUTH_SOCK"),
}
"""The caller's variables that these programs need to reach their servers."""
_IN_FOLDER = 'mkdir -p -- "$0" && cd -- "$0" && exec "$@"'


class ContainerSandbox(CommandSandbox):
    """The sandbox that `prefix` enters. Its client programs are processes of `host`, which has the local folder."""

    def __init__(self, prefix: Sequence[str], workdir: str, host: LocalProcessSandbox) -> None:
        super().__init__({})
        self._prefix, self._workdir, self._host = list(prefix), workdir, host
        self._program = PurePath(self._prefix[0]).name
        self._names: list[str] = []

    @property
    def working_folder(self) -> str:
        return self._workdir

    async def start(self) -> None:
        """Do nothing: the container is started by `container_start` or by each command."""

    async def stop(self) -> None:
        await self.kill_all()

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> LocalProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        given = {**(env or {}), MARK: self._host.mark}
        by_name = given if _VARIABLES in self._prefix else {}
        variables = {**self._client_variables(), **by_name}
        return await self._host.launch(self.command_line(words, given), variables, stdin=stdin, output=output)

    def command_line(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        prefix = self._named_prefix()
        inner = ["/bin/sh", "-c", _IN_FOLDER, self._workdir, *words]
        if _VARIABLES in prefix:
            at = prefix.index(_VARIABLES)
            prefix[at : at + 1] = [part for name in env for part in ("-e", name)]
        else:
            inner = ["env", *(f"{name}={value}" for name, value in env.items()), *inner]
        if not any(_COMMAND in word for word in prefix):
            return [*prefix, *inner]
        return [word.replace(_COMMAND, shlex.join(inner)) for word in prefix]

    async def kill_all(self) -> None:
        """Kill all commands: remove the containers of `run`, or kill all processes that this sandbox has started."""
        await self._host.kill_all()
        if self._makes_containers:
            if self._names:
                await self._client([self._prefix[0], "rm", "--force", *self._names])
            self._names.clear()
        else:
            await self._client(self.command_line(["/bin/sh", "-c", KILL, f"{MARK}={self._host.mark}"], {}))

    async def _client(self, words: Sequence[str]) -> None:
        """Run a program that ends other processes.

        It does not have their mark: where it sees its own process, it would kill itself.
        """
        variables = {"HOME": str(self._host.folder / "home"), **self._client_variables()}
        process = LocalProcess(words, str(self._host.folder), variables)
        try:
            await process.wait()
        finally:
            process.kill()

    @property
    def _makes_containers(self) -> bool:
        """Whether each command has its own container, which must be removed by its name."""
        own_name = any(word == "--name" or word.startswith("--name=") for word in self._prefix)
        return self._program in _CONTAINERS and self._prefix[1:2] == ["run"] and not own_name

    def _named_prefix(self) -> list[str]:
        if not self._makes_containers:
            return list(self._prefix)
        name = f"tokengrove-{uuid.uuid4().hex}"
        self._names.append(name)
        return [*self._prefix[:2], "--name", name, *self._prefix[2:]]

    def _client_variables(self) -> dict[str, str]:
        return inherited_variables(_CLIENTS.get(self._program, ()))
