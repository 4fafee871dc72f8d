"""Names of fields. As in Google's own API, a client may write each in camel case or in snake case."""

from __future__ import annotations

import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import Any

MOST_SHOWN = 64
"""The most characters that an error shows of a name that the client chose."""
_LETTER = re.compile("_([a-z])")


def camel(name: str) -> str:
    """Return a name in camel case."""
    return _LETTER.sub(lambda found: found[1].upper(), name.lstrip("_")) if "_" in name else name


def in_camel(value: Mapping[str, Any], known: AbstractSet[str]) -> Mapping[str, Any]:
    """Return `value` with the names of `known` fields in camel case; other names stay, for messages about them."""
    if value.keys() <= known:
        return value
    return {name if name in known or camel(name) not in known else camel(name): item for name, item in value.items()}


def given(value: Mapping[str, Any]) -> list[str]:
    """The names of the fields that are set: null means absent."""
    return [name for name, item in value.items() if item is not None]
