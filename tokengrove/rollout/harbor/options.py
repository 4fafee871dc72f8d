"""The options of an agent that plays Harbor tasks: those of its environment, and those of a command that apply."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Literal, get_args

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.harbor.recipe import RunLines
from tokengrove.rollout.option_values import flag, read_value

SandboxKind = Literal["room", "docker", "podman"]
OF_COMMAND = ("model", "env", "pass_env", "server_url", "stdin", "keep_output")
"""The options of a command that have a meaning for one that plays a Harbor task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborOptions:
    """How the environments of Harbor tasks are made, and what counts as played.

    - `sandbox`: `room` (this machine, no containers), `docker` or `podman`.
    - `sandbox_args`: further words of `docker run`.
    - `dockerfile_run`: what becomes of RUN lines in a room: `run`, `try` or `skip`.
    - `visible`: paths of this machine in its homes, /tmp or /app that a room shows, read-only.
    - `accept`: what a task asks for in vain and is played without, by name (`docker_image`, `gpus`, ...).
    - `reward_key`: which of several rewards is the session's; the others become scores.
    - `strict`: an agent that ran too long, or did not end with 0, has failed. Otherwise, as in Harbor, the tests say.
    - `kill_before_tests`: what the agent has left running is killed. Tests of servers need it left.
    - `timeout_multiplier`: of all time limits in task.toml.
    """

    sandbox: SandboxKind = "room"
    sandbox_args: tuple[str, ...] = ()
    dockerfile_run: RunLines = "run"
    visible: tuple[str, ...] = ()
    accept: tuple[str, ...] = ()
    reward_key: str = "reward"
    strict: bool = False
    kill_before_tests: bool = False
    timeout_multiplier: float = 1.0
    command: CommandOptions = field(default_factory=CommandOptions)

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> HarborOptions:
        """Make the options of values in JSON's types. Raises ConfigurationError that names the option."""
        own = {each.name: str(each.type) for each in fields(cls) if each.name != "command"}
        read: dict[str, Any] = {}
        of_command: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in own:
                value = value.split(",") if name == "accept" and isinstance(value, str) else value
                read[name] = read_value(name, _type(own[name]), value)
            elif name in OF_COMMAND:
                of_command[name] = value
            else:
                raise ConfigurationError(_unknown(name, [*own, *OF_COMMAND]))
        return cls(**read, command=CommandOptions.read(of_command))._checked()

    def _checked(self) -> HarborOptions:
        for name, allowed in (("sandbox", get_args(SandboxKind)), ("dockerfile_run", get_args(RunLines))):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(
                    f"{flag(name)} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}"
                )
        if not 0 < self.timeout_multiplier < math.inf:
            raise ConfigurationError(f"--timeout-multiplier must be more than 0, not {self.timeout_multiplier:g}")
        if self.sandbox != "room" and (self.visible or self.dockerfile_run != "run"):
            raise ConfigurationError("--visible and --dockerfile-run apply to --sandbox room only")
        if self.sandbox == "room" and self.sandbox_args:
            raise ConfigurationError("--sandbox-args applies to --sandbox docker and podman only")
        return self


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments into those that are options here, and the others."""
    names = {*OF_COMMAND, *(each.name for each in fields(HarborOptions) if each.name != "command")}
    here = {name: value for name, value in arguments.items() if name in names}
    return here, {name: value for name, value in arguments.items() if name not in names}


def _type(declared: str) -> str:
    return "str" if declared in ("SandboxKind", "RunLines") else declared


def _unknown(name: str, known: list[str]) -> str:
    if name in {each.name for each in fields(CommandOptions)}:
        return f"{flag(name)} does not apply to Harbor tasks, which bring their environment and tests along"
    near = get_close_matches(name, known, 1) or sorted(known)
    return f"{flag(name)} is no option for Harbor tasks; known: {', '.join(near)}"
