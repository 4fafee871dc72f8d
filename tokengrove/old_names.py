"""Maps the module names of the first releases, in which modules of this package were in `proxy`, to their new names."""

from __future__ import annotations

import re
from typing import Any

_SYSTEMS = re.compile(r"proxy\.rollout\.((?:areal|verl|roll|openenv|trl|kinds|runs)\b.*)")
_OTHERS = re.compile(r"proxy\.((?:rollout|client|errors|reasons)\b.*)")


def new_name(name: str) -> str | None:
    """The new name of a module or an object in it; None if it has not moved."""
    found = _SYSTEMS.fullmatch(name) or _OTHERS.fullmatch(name)
    return None if found is None else f"tokengrove.{found[1]}"


def with_new_names(value: Any) -> Any:
    """A JSON value with each text that is an old name replaced by the new name."""
    if isinstance(value, str):
        return new_name(value) or value
    if isinstance(value, list):
        return [with_new_names(each) for each in value]
    return {key: with_new_names(each) for key, each in value.items()} if isinstance(value, dict) else value
