"""The settings that all remote sandboxes have. A provider's class adds its own as a subclass of `RemoteSettings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import option, options_of
from tokengrove.options.values import read_value


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSettings:
    """Settings of a sandbox at a provider. `read_settings` makes and checks them."""

    max_concurrent: int | None = option(None, "Sandboxes of this provider at once, per process.", least=1)
    max_lifetime_s: float = option(3600.0, "Seconds after which the provider deletes a sandbox.", least=60)
    startup_timeout: float = option(300.0, "Seconds within which a sandbox must have started.", above=0)
    workdir: str | None = option(None, "Absolute path of the working folder.", otherwise="work in its HOME")
    experiment_id: str | None = option(None, "Label `tokengrove-experiment` of the sandbox; ROLL's runners set it.")
    env: Mapping[str, str] = option({}, "Environment variables of all commands.")


Settings = TypeVar("Settings", bound=RemoteSettings)


def read_settings(kind: type[Settings], environment: Mapping[str, Any]) -> Settings:
    """The settings in a section `environment`. Raises ConfigurationError, which names the wrong one."""
    known, read = options_of(kind), {}
    for name, value in environment.items():
        if name not in known:
            near = get_close_matches(name, known, 1) or sorted(known)
            raise ConfigurationError(f"{name!r} is not a setting of this sandbox; known: {', '.join(near)}")
        if value is not None:
            try:
                read[name] = read_value(known[name], value, numbers=True)
            except ValueError as error:
                raise ConfigurationError(f"{name} must be {error}, not {value!r}") from None
            if (fault := known[name].fault(read[name])) is not None:
                raise ConfigurationError(f"{name} {fault}")
    settings = kind(**read)
    if settings.max_concurrent is None:
        raise ConfigurationError(
            "max_concurrent is missing: each sandbox costs money and counts against the account's quota, so say how "
            "many may exist at once (max_concurrent=8)"
        )
    if settings.workdir is not None and not settings.workdir.startswith("/"):
        raise ConfigurationError(f"workdir must be an absolute path, not {settings.workdir!r}")
    return settings
