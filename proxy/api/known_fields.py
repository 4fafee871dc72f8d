"""Refuses unknown and misplaced fields of a body by name, because an ignored filter would match every session."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from tokengrove.errors import InvalidRequest


def check_known(fields: Mapping[str, Any], known: Collection[str], at: str = "") -> None:
    """Raise InvalidRequest for the first of `fields` that is not in `known`. `at`: the path of `fields`, with its dot.

    The message has the path as the client wrote it, the nearest known name if one is close, and all known names.
    """
    for name in fields:
        if name not in known:
            path, owner = f"{at}{name}", f"'{at[:-1]}'" if at else "this endpoint"
            accepted = ", ".join(known) or "no fields"
            raise InvalidRequest(f"'{path}' is unknown{_hint(name, known, at)} {owner} accepts {accepted}", param=path)


def check_given(body: Mapping[str, Any], known: Collection[str], at: str = "") -> None:
    """Raise InvalidRequest for the first field of a body that is not null and not in `known`: null means absent."""
    check_known({name: value for name, value in body.items() if value is not None}, known, at)


def _hint(name: str, known: Collection[str], at: str) -> str:
    if at == f"{name}.":
        return f": write the fields of '{name}' directly inside it;"
    near = difflib.get_close_matches(name, known, 1)
    return f"; did you mean '{at}{near[0]}'?" if near else ";"


def refuse(body: Mapping[str, Any], names: Iterable[str], why: str, at: str = "") -> None:
    """Raise InvalidRequest for the first of the fields `names` in a body. `why`: the message after "'NAME' "."""
    for name in names:
        if body.get(name) is not None:
            raise InvalidRequest(f"'{at}{name}' {why}", param=at + name)
