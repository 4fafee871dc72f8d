"""The variables in `task.toml`: values, or `${NAME}` and `${NAME:-default}` for variables of the caller."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tokengrove.rollout.harbor.task_folder import BadTask

_TEMPLATE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}", re.DOTALL)


def resolved(env: Mapping[str, str], where: str) -> dict[str, str]:
    """The values of the variables. `where`: the table's name. Raises BadTask if a variable of the caller is missing."""
    return {name: _value(name, value, where) for name, value in env.items()}


def _value(name: str, value: str, where: str) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    found = os.environ.get(match[1], match[2])
    if found is None:
        raise BadTask(f"{where}.env: {name} = {value!r}, but the variable {match[1]} is not set")
    return found
