"""Grammars for constrained output, independent of the library that an engine enforces them with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.types import Json


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """One piece of a constrained output: a literal, or a JSON value.

    `schema`: a JSON value that the schema accepts, if set. `token_id`: a literal that is this one marker token, if set.
    `text`: else, a literal in any tokenisation.
    """

    text: str = ""
    token_id: int | None = None
    schema: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a constrained output: one of `alternatives`, or with `repeat` one or more of them in a row.

    `separator` stands between repetitions. Only an end token may follow the last part.
    """

    alternatives: tuple[tuple[GrammarPart, ...], ...]
    repeat: bool = False
    separator: str = ""
