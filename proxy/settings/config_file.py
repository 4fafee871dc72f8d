"""Settings from a TOML file. Its keys are the names of the settings, at the top level, without tables."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proxy.settings.kinds import SETTINGS, convert, did_you_mean, masked
from tokengrove.errors import ConfigurationError


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
    if isinstance(value, dict):
        raise ConfigurationError(f"{place} is a table; the file has no tables: write each setting as `name = value`")
    if name not in SETTINGS:
        raise ConfigurationError(f"{place} is no setting{did_you_mean(name.replace('-', '_').lower(), SETTINGS)}")
    return convert(place, value, SETTINGS[name]), place


def _line(text: str, name: str) -> str:
    """The line of a key or a table, found by a search, since tomllib does not report it; "" if it is not found."""
    key = re.compile(rf"\s*\[*\s*[\"']?{re.escape(name)}[\"']?\s*[].=]")
    numbers = (number for number, line in enumerate(text.splitlines(), 1) if key.match(line))
    number = next(numbers, None)
    return "" if number is None else f", line {number}"
