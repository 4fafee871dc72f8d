"""The sources of settings. A flag overrides its TOKENGROVE_* variable, which overrides the configuration file, which
overrides the default.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from proxy.settings.kinds import SETTINGS, convert, did_you_mean, masked
from proxy.settings.settings import Settings
from proxy.settings.variables import CONFIG_VARIABLE, read_variables, variable_of
from tokengrove import initial_block
from tokengrove.errors import ConfigurationError
from tokengrove.options.option import flag_of


@dataclass(frozen=True, slots=True)
class Sources:
    """Settings with their origins.

    `origins`: the flag, the variable or the place in the file of each setting that was given. `warning`: a warning
    about the file for the operator.
    """

    settings: Settings
    origins: Mapping[str, str]
    warning: str | None = None

    @contextmanager
    def named(self) -> Iterator[None]:
        """Add the origins of the settings that are named in a ConfigurationError of the block to its message."""
        try:
            yield
        except ConfigurationError as error:
            raise _with_origins(error, self.origins) from None


def read_sources(
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    *,
    config: Path | None = None,
    only: Collection[str] = tuple(SETTINGS),
) -> Sources:
    """Read settings from flags (None: not given), variables, and the file `config`, or else TOKENGROVE_CONFIG.

    `only`: the settings to use. The others have their defaults, so their given values need not be valid together.
    Raises ConfigurationError naming the flag, the variable or the place in the file.
    """
    environ = initial_block.environment() if environ is None else environ
    path = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    found = {} if path is None else dict(read_config_file(path))
    warning = None if path is None else readable_secret(path, found)
    found |= {name: (value, variable_of(name)) for name, value in read_variables(environ).items()}
    for name, value in flags.items():
        if value is not None:
            found[name] = (tuple(value) if isinstance(value, list) else value, flag_of(name))
    found = {name: found[name] for name in found if name in only}
    origins = {name: origin for name, (_, origin) in found.items()}
    try:
        return Sources(Settings(**{name: value for name, (value, _) in found.items()}), origins, warning)
    except ConfigurationError as error:
        raise _with_origins(error, origins) from None


def read_settings(
    flags: Mapping[str, Any], environ: Mapping[str, str] | None = None, *, config: Path | None = None
) -> Settings:
    """Read settings like `read_sources`."""
    return read_sources(flags, environ, config=config).settings


def _with_origins(error: ConfigurationError, origins: Mapping[str, str]) -> ConfigurationError:
    """The same error, with the origins of the flags that it names, for settings that were not given as flags."""
    flags = dict.fromkeys(re.findall(r"--[a-z][a-z-]*", str(error)))
    by_flag = {flag_of(name): origin for name, origin in origins.items()}
    told = [f"{flag} is {by_flag[flag]}" for flag in flags if by_flag.get(flag, flag) != flag]
    return ConfigurationError(f"{error} ({'; '.join(told)})") if told else error


def read_config_file(path: Path) -> Mapping[str, tuple[Any, str]]:
    """The value and the place of each setting in the file. Raises ConfigurationError naming file, line and key."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"--config {path} is not text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"--config {path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"--config {path} is nested too deeply") from None
    return {name: _checked(path, text, name, value) for name, value in found.items()}


def readable_secret(path: Path, found: Mapping[str, tuple[Any, str]]) -> str | None:
    """A warning if the file has a secret and other users of this machine can read it, else None."""
    secret = next((name for name, (value, _) in found.items() if masked(name, value) != value), None)
    if secret is None or os.name != "posix" or not path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        return None
    return f"{path} has a secret ({secret}), and other users of this machine can read it: chmod 600 {path}"


def _checked(path: Path, text: str, name: str, value: Any) -> tuple[Any, str]:
    place = f"{name} in {path}{_line(text, name)}"
    if name == "models" and isinstance(value, dict):
        return orjson.dumps(value).decode(), place
    if isinstance(value, dict):
        raise ConfigurationError(f"{place} is a table; only models may be one: write each setting as `name = value`")
    if name not in SETTINGS:
        raise ConfigurationError(f"{place} is no setting{did_you_mean(name.replace('-', '_').lower(), SETTINGS)}")
    return convert(place, value, SETTINGS[name]), place


def _line(text: str, name: str) -> str:
    """The line of a key or a table, found by a search, since tomllib does not report it; "" if it is not found."""
    key = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[].=]")
    numbers = (number for number, line in enumerate(text.splitlines(), 1) if key.match(line))
    number = next(numbers, None)
    return "" if number is None else f", line {number}"
