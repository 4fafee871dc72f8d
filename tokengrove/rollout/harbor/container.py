"""A Harbor environment in a container, through the command line of `docker` or `podman`.

The container ends when this process ends or is killed, because its main process reads from this process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import subprocess
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor.harbor_sandbox import (
    AGENT_LOGS,
    ARTIFACTS,
    TESTS,
    VERIFIER_LOGS,
    Blueprint,
    HarborSandbox,
)
from tokengrove.rollout.harbor.holder import Holder
from tokengrove.rollout.sandboxes.local_process import LocalProcess
from tokengrove.rollout.sandboxes.sandbox import Command
from tokengrove.rollout.threads import in_thread

_READY = "ready"
_OF_THE_CLIENT = ("PATH", "HOME", "DOCKER_", "CONTAINER")
"""Prefixes of the variables from which docker and podman read their programs, settings and server."""
_KILL = """
for look in 1 2 3; do
  for each in /proc/[0-9]*; do
    case ${each#/proc/} in 1|$$|$0) ;; *) kill -9 "${each#/proc/}" ;; esac
  done
done 2> /dev/null
:"""
"""Kills all processes except the first and process $0. It repeats, because processes may start others meanwhile."""


class Images:
    """The images of one run. An image is built once for all episodes. A failed build is repeated by a later episode."""

    def __init__(self, program: str) -> None:
        """`program`: docker or podman. Raises ConfigurationError if it is not installed."""
        if shutil.which(program) is None:
            raise ConfigurationError(f"sandbox={program}: there is no program {program!r} on PATH")
        self.program = program
        self._made: dict[str, asyncio.Task[str]] = {}

    async def image(self, blueprint: Blueprint, sandbox: Container) -> str:
        """The name of the image of an environment, ready-made or built. Raises RuntimeError if it cannot be built."""
        if blueprint.table.docker_image:
            return blueprint.table.docker_image
        key = str(blueprint.build)
        if key not in self._made or self._failed(key):
            self._made[key] = asyncio.create_task(self._build(blueprint.build, sandbox))
        return await asyncio.shield(self._made[key])

    async def close(self) -> None:
        """Cancel the builds that still run, because no episode waits for them."""
        for build in self._made.values():
            build.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)

    def _failed(self, key: str) -> bool:
        task = self._made[key]
        return task.done() and (task.cancelled() or task.exception() is not None)

    async def _build(self, folder: Path, sandbox: Container) -> str:
        name = f"tokengrove-harbor-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
        await sandbox.on_this_machine([self.program, "build", "--tag", name, str(folder)])
        return name


class Container(HarborSandbox):
    """A container. `arguments`: further arguments of `docker run`. Unless they set a network, it is the machine's."""

    def __init__(self, blueprint: Blueprint, images: Images, arguments: Sequence[str] = ()) -> None:
        super().__init__(blueprint)
        self._images, self._program, self._arguments = images, images.program, tuple(arguments)
        self._name = f"tokengrove-{uuid.uuid4().hex[:16]}"
        self._workdir = blueprint.table.workdir or ""
        self._main = ""  # the process id of the container's main process
        self._finalizer: weakref.finalize[..., Any] | None = None

    @property
    def working_folder(self) -> str:
        return self._workdir

    async def start(self) -> None:
        image = await self._images.image(self.blueprint, self)
        holder = Holder([self._program, *self._run_words(image)], os.environ)
        self._finalizer = weakref.finalize(self, _remove, holder, self._program, self._name)
        line = await holder.ready()
        said, _, self._main = line.partition(" ")
        if said != _READY or not self._main.isdigit():
            raise RuntimeError(
                f"the container of {image} printed {line!r} instead of {_READY!r}: does the image have an entry point?"
            )
        if not self._workdir:
            self._workdir = (await self.run(["pwd"])).output.strip()
        await self.empty(TESTS, AGENT_LOGS, VERIFIER_LOGS, ARTIFACTS)
        if self._loose_files():
            await self.put([(self.blueprint.build, self._workdir)])

    def command_line(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        # Values are passed by name, to keep them out of the list of processes, unless the client would read them.
        names = [f"{name}={value}" if name.startswith(_OF_THE_CLIENT) else name for name, value in env.items()]
        given = [word for name in names for word in ("--env", name)]
        user = [] if self.user is None else ["--user", str(self.user)]
        workdir = ["--workdir", self._workdir] if self._workdir else []
        return [self._program, "exec", "-i", *user, *workdir, *given, self._name, *words]

    async def launch(
        self, command: Command, env: Mapping[str, str] | None = None, *, stdin: bytes = b"", output: Path | None = None
    ) -> LocalProcess:
        words = ["/bin/sh", "-c", command] if isinstance(command, str) else list(command)
        variables = {**self.blueprint.env, **(env or {})}
        line = self.command_line(words, variables)
        by_name = {name: value for name, value in variables.items() if not name.startswith(_OF_THE_CLIENT)}
        return LocalProcess(line, os.getcwd(), {**os.environ, **by_name}, stdin, output)

    async def kill_all(self) -> None:
        user, self.user = self.user, 0
        try:
            await self.run(["/bin/sh", "-c", _KILL, self._main])
        finally:
            self.user = user

    async def stop(self) -> None:
        if self._finalizer is not None:
            await in_thread(self._finalizer, "tokengrove-container-stop")

    def _run_words(self, image: str) -> list[str]:
        table = self.blueprint.table
        limits = [] if table.cpus is None else ["--cpus", str(table.cpus)]
        limits += [] if table.memory_mb is None else ["--memory", f"{table.memory_mb}m"]
        limits += ["--gpus", str(table.gpus)] if table.gpus else []
        network = [] if any(word.startswith(("--network", "--net")) for word in self._arguments) else ["--network=host"]
        holds = ["sh", "-c", f"echo {_READY} $$; exec cat > /dev/null"]
        return ["run", "-i", "--rm", "--init", "--name", self._name, *network, *limits, *self._arguments, image, *holds]

    def _loose_files(self) -> bool:
        """Whether the files of the task's folder are added to a ready-made image, as in Harbor."""
        build = self.blueprint.build
        plain = build.is_dir() and not (build / "Dockerfile").is_file()
        return bool(self.blueprint.table.docker_image) and plain and any(build.iterdir())


def _remove(holder: Holder, program: str, name: str) -> None:
    subprocess.run([program, "rm", "--force", name], capture_output=True, check=False)
    holder.close()
