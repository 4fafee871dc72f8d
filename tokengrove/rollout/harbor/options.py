"""The options of an agent that plays Harbor tasks: those of its environment, and the options of commands that apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Literal

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import flag_of, option, options_of
from tokengrove.rollout.command_options import CommandOptions, read_argument
from tokengrove.rollout.harbor.recipe import RunLines

SandboxKind = Literal["room", "docker", "podman"]
OF_COMMAND = ("model", "env", "pass_env", "server_url", "stdin", "keep_output")
"""The options of a command that also apply to Harbor tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarborOptions:
    """How the environments of Harbor tasks are made, and how their results are judged."""

    sandbox: SandboxKind = option("room", "room (this machine, without containers), docker or podman.")
    sandbox_args: tuple[str, ...] = option((), "Further arguments of `docker run`.")
    dockerfile_run: RunLines = option("run", "RUN lines in a room: run, try (ignore failures) or skip.")
    visible: tuple[str, ...] = option((), "Paths in homes, /tmp or /app of this machine that a room shows, read-only.")
    accept: tuple[str, ...] = option(
        (), "Unmet requirements, by name (docker_image, gpus, ...), with which tasks are played nevertheless."
    )
    reward_key: str = option("reward", "Name of the session's reward if there are several; the others become scores.")
    strict: bool = option(
        False,
        "Fail if the agent timed out or did not exit with 0. By default, as in Harbor, the tests decide.",
    )
    kill_before_tests: bool = option(
        False, "Kill processes that the agent has left before the tests. Tests of servers need them."
    )
    timeout_multiplier: float = option(1.0, "Factor of all time limits in task.toml.", above=0)
    command: CommandOptions = field(default_factory=CommandOptions)

    @classmethod
    def read(cls, arguments: Mapping[str, Any]) -> HarborOptions:
        """Make the options from values of JSON types. Raises ConfigurationError, which names the option."""
        own = options_of(cls)
        read: dict[str, Any] = {}
        of_command: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in own:
                value = value.split(",") if name == "accept" and isinstance(value, str) else value
                read[name] = read_argument(own[name], value)
            elif name in OF_COMMAND:
                of_command[name] = value
            else:
                raise ConfigurationError(_unknown(name, [*own, *OF_COMMAND]))
        return cls(**read, command=CommandOptions.read(of_command))._checked()

    def _checked(self) -> HarborOptions:
        for name, each in options_of(HarborOptions).items():
            each.check(getattr(self, name))
        if self.sandbox != "room" and (self.visible or self.dockerfile_run != "run"):
            raise ConfigurationError("--visible and --dockerfile-run apply to --sandbox room only")
        if self.sandbox == "room" and self.sandbox_args:
            raise ConfigurationError("--sandbox-args applies to --sandbox docker and podman only")
        return self


def split(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide arguments into options and others."""
    names = {*OF_COMMAND, *options_of(HarborOptions)}
    here = {name: value for name, value in arguments.items() if name in names}
    return here, {name: value for name, value in arguments.items() if name not in names}


def _unknown(name: str, known: list[str]) -> str:
    if name in options_of(CommandOptions):
        return f"{flag_of(name)} does not apply to Harbor tasks, which have their own environment and tests"
    near = get_close_matches(name, known, 1) or sorted(known)
    return f"{flag_of(name)} is not an option for Harbor tasks; known: {', '.join(near)}"
