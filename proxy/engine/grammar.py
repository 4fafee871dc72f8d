"""Grammars for constrained output, independent of the library with which an engine enforces them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.types import Json


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """One piece of a constrained output: a literal, or a JSON value.

    `schema`: if set, a JSON value that matches this schema. `token_id`: if set, exactly this marker token. `text`:
    otherwise, a literal text in any tokenisation.
    """

    text: str = ""
    token_id: int | None = None
    schema: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a constrained output: one of `alternatives`, or with `repeat` one or more in a row.

    `separator`: the text between repetitions. Only an end token may follow the last part.
    """

    alternatives: tuple[tuple[GrammarPart, ...], ...]
    repeat: bool = False
    separator: str = ""
