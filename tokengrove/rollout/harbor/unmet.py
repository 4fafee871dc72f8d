"""Requirements of a task that this kind of environment cannot meet.

A requirement without which results would be wrong is an error, unless the user accepts it by name. Other differences
are logged once per process.
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
    """A requirement. `name`: the name by which a user accepts it."""

    name: str
    text: str


def refused(task: TaskFolder, image: bool) -> Iterator[Unmet]:
    """The requirements without which results would be wrong. `image`: the environment is made from an image."""
    table = task.config.environment
    yield from _of_table(table, image)
    if table.docker_image and not image and not (task.environment / "Dockerfile").is_file():
        yield Unmet("docker_image", f"docker_image = {table.docker_image!r}: the content of the image is missing")
    if table.mcp_servers:
        yield Unmet("mcp_servers", "mcp_servers: they are not passed to the agent")
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
        yield Unmet("docker_image", f"verifier.environment: the content of the image {table.docker_image!r} is missing")


def _of_table(table: Environment, image: bool) -> Iterator[Unmet]:
    if table.os != "linux":
        yield Unmet("os", f"os = {table.os!r}: its scripts need Windows")
    if table.gpus and not image:
        yield Unmet("gpus", f"gpus = {table.gpus}: no device is available")
    if table.tpu:
        yield Unmet("tpu", "tpu: no device is available")


def differences(task: TaskFolder, image: bool) -> Iterator[Unmet]:
    """The requirements without which the run of the task differs."""
    config = task.config
    for name in config.unknown():
        yield Unmet(name, f"{name} in task.toml is unknown and not used")
    table = config.environment
    if not image:
        for name in ("cpus", "memory_mb"):
            if getattr(table, name) is not None:
                yield Unmet(name, f"environment.{name} is not a limit here")
        if config.agent.user is not None or config.verifier.user is not None:
            yield Unmet("user", "agent.user and verifier.user: all commands run as one user")
        yield from (Unmet(name, text) for name, text in not_followed(task.environment))
    if table.storage_mb is not None:
        yield Unmet("storage_mb", "environment.storage_mb is not a limit here")
    modes = [table.network_mode, config.agent.network_mode, config.verifier.network_mode]
    if restricted := sorted({mode for mode in modes if mode not in (None, "public")}):
        yield Unmet("network_mode", f"network_mode = {restricted[0]!r}: the network is open")
    if table.skills_dir is not None:
        yield Unmet("skills_dir", "environment.skills_dir: it is not passed to the agent")


_said: set[str] = set()


def check(task: TaskFolder, image: bool, accepted: Collection[str]) -> None:
    """Log differences, once for each name. Raise BadTask for requirements that are refused and not accepted."""
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
