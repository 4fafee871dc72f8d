"""The keys that a run's file has of its own: the options of a run, by their names and in their types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_origin, get_type_hints

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.fields import checked
from tokengrove.rollout.run_options import RunOptions

SERVER = "server"
_OF_COMMANDS = {"validation"}
"""`tokengrove eval` is the command that validates."""
NAMES = tuple(spec.name for spec in fields(RunOptions) if spec.name not in _OF_COMMANDS)
_PATHS = ("data", "folder", "output")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+(\.\w+)*")
_HINTS = get_type_hints(RunOptions)


def converted(name: str, value: Any, folder: Path) -> Any:
    """The value of an option; a relative path is one from `folder`. Raises InvalidRequest for one of another type."""
    if value is None:
        return None
    kind = _HINTS[name]
    if kind == tuple[str, ...]:
        return _texts(name, value)
    if get_origin(kind) is Mapping:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"{name} must be a mapping, not {value!r}")
        return dict(value)
    found = checked(value, kind, name)
    if name in _PATHS and not _FUNCTION.fullmatch(found):
        return str(folder / found)
    return found


def near(name: object, *, closely: bool = False) -> str:
    """`; did you mean X?` if there is a similar name, else nothing."""
    found = get_close_matches(str(name).replace("-", "_"), [*NAMES, SERVER], 1, 0.85 if closely else 0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts, or one text: a command is divided into words as a shell does it."""
    if isinstance(value, str):
        return tuple(shlex.split(value)) if name == "command" else (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(each, str | int | float) for each in value):
        raise InvalidRequest(f"{name} must be a list of texts, not {value!r}")
    return tuple(map(str, value))
