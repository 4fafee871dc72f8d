"""What a task asks of its environment that an environment without an image, or this one, cannot give.

What makes results wrong is refused, unless the user accepts it by its name; what only makes them differ is named, once
in a process.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from tokengrove.rollout.harbor.recipe import not_followed
from tokengrove.rollout.harbor.task_config import Environment
from tokengrove.rollout.harbor.task_folder import BadTask, Stage, TaskFolder

_log = logging.getLogger(__name__)


class Unmet(NamedTuple):
    """`name` is what a user accepts it by."""

    name: str
    text: str


def refused(task: TaskFolder, image: bool) -> Iterator[Unmet]:
    """What the run of the task would be wrong without. `image`: its environment is made from an image."""
    table = task.config.environment
    yield from _of_table(table, image)
    if table.docker_image and not image and not (task.environment / "Dockerfile").is_file():
        yield Unmet("docker_image", f"docker_image = {table.docker_image!r}: what is in the image is missing")
    if table.mcp_servers:
        yield Unmet("mcp_servers", "mcp_servers: the agent is not told of them")
    if (task.environment / "docker-compose.yaml").is_file():
        yield Unmet("docker-compose.yaml", "environment/docker-compose.yaml: only one container is run")
    for stage in task.stages:
        yield from _of_stage(task, stage, image)


def _of_stage(task: TaskFolder, stage: Stage, image: bool) -> Iterator[Unmet]:
    if any(each.service not in (None, "main") for each in stage.artifacts):
        yield Unmet("artifacts.service", "artifacts of a service: only one container is run")
    if any(each.service != "main" for each in task.config.verifier.collect):
        yield Unmet("verifier.collect", "verifier.collect of a service: only one container is run")
    if not stage.separate:
        return
    table, folder = task.verifier_environment(stage)
    yield from _of_table(table, image)
    if folder != task.environment and not image and not (folder / "Dockerfile").is_file():
        yield Unmet("docker_image", f"verifier.environment: what is in the image {table.docker_image!r} is missing")


def _of_table(table: Environment, image: bool) -> Iterator[Unmet]:
    if table.os != "linux":
        yield Unmet("os", f"os = {table.os!r}: its scripts need Windows")
    if table.gpus and not image:
        yield Unmet("gpus", f"gpus = {table.gpus}: no device is given to it")
    if table.tpu:
        yield Unmet("tpu", "tpu: no device is given to it")


def differences(task: TaskFolder, image: bool) -> Iterator[Unmet]:
    """What the run of the task is different without."""
    config = task.config
    for name in config.unknown():
        yield Unmet(name, f"{name} in task.toml has no meaning and is not used")
    table = config.environment
    if not image:
        for name in ("cpus", "memory_mb"):
            if getattr(table, name) is not None:
                yield Unmet(name, f"environment.{name} is not a limit here")
        if config.agent.user is not None or config.verifier.user is not None:
            yield Unmet("user", "agent.user and verifier.user: all runs as one user")
        yield from (Unmet(name, text) for name, text in not_followed(task.environment))
    if table.storage_mb is not None:
        yield Unmet("storage_mb", "environment.storage_mb is not a limit here")
    modes = [table.network_mode, config.agent.network_mode, config.verifier.network_mode]
    if restricted := sorted({mode for mode in modes if mode not in (None, "public")}):
        yield Unmet("network_mode", f"network_mode = {restricted[0]!r}: the network is open")
    if table.skills_dir is not None:
        yield Unmet("skills_dir", "environment.skills_dir: the agent is not told of it")


_said: set[str] = set()


def check(task: TaskFolder, image: bool, accepted: Collection[str]) -> None:
    """Say what differs, once for each name; raise BadTask for what is refused and not accepted."""
    wrong: Mapping[str, Unmet] = {each.name: each for each in refused(task, image)}
    if refusals := {name: each for name, each in wrong.items() if name not in accepted}:
        texts = "; ".join(each.text for each in refusals.values())
        with_image = {each.name for each in refused(task, image=True)}
        docker = "" if with_image & refusals.keys() else "Run it with sandbox=docker, or accept"
        raise BadTask(f"{task.folder}: {texts}. {docker or 'Accept'} that with accept={','.join(refusals)}")
    for each in [*wrong.values(), *differences(task, image)]:
        if each.name not in _said:
            _said.add(each.name)
            _log.warning("Harbor task %s, and maybe others: %s", task.name, each.text)
