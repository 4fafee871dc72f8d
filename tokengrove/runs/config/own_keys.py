"""The own keys of a run's file: the options of a run, with their names and types."""

from __future__ import annotations

import re
import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.options.option import options_of
from tokengrove.options.values import read_value
from tokengrove.rollout.run_options import RunOptions

SERVER = "server"
_OF_COMMANDS = {"validation"}
"""Set by the command: `tokengrove eval` validates."""
_OPTIONS = options_of(RunOptions)
NAMES = tuple(name for name in _OPTIONS if name not in _OF_COMMANDS)
_PATHS = ("data", "folder", "output")
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.\w+)*:\w+(\.\w+)*")


def converted(name: str, value: Any, folder: Path) -> Any:
    """The value of an option. A relative path is relative to `folder`. Raises InvalidRequest for a wrong type."""
    if value is None:
        return None
    option = _OPTIONS[name]
    if option.repeats and isinstance(value, str):
        value = shlex.split(value) if name == "command" else [value]
    try:
        found = read_value(option, value, numbers=option.repeats)
    except ValueError as error:
        raise InvalidRequest(f"{name} must be {error}, not {value!r}") from None
    if name in _PATHS and not _FUNCTION.fullmatch(found):
        return str(folder / found)
    return found


def near(name: object, *, closely: bool = False) -> str:
    """`; did you mean X?` if there is a similar name, else ""."""
    found = get_close_matches(str(name).replace("-", "_"), [*NAMES, SERVER], 1, 0.85 if closely else 0.6)
    return f"; did you mean {found[0]!r}?" if found else ""
