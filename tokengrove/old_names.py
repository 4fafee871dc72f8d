"""The names that modules of this package had as parts of `proxy`, in the first releases."""

from __future__ import annotations

import re
from typing import Any

_SYSTEMS = re.compile(r"proxy\.rollout\.((?:areal|verl|roll|openenv|trl|kinds|runs)\b.*)")
_OTHERS = re.compile(r"proxy\.((?:rollout|client|errors|reasons)\b.*)")


def new_name(name: str) -> str | None:
    """The name that a module, or what is in it, has now; None if it has not moved."""
    found = _SYSTEMS.fullmatch(name) or _OTHERS.fullmatch(name)
    return None if found is None else f"tokengrove.{found[1]}"


def with_new_names(value: Any) -> Any:
    """A value of JSON in which each text that is an old name is the new one."""
    if isinstance(value, str):
        return new_name(value) or value
    if isinstance(value, list):
        return [with_new_names(each) for each in value]
    return {key: with_new_names(each) for key, each in value.items()} if isinstance(value, dict) else value
