"""What an output under a grammar must look like, in terms that no engine's library is named in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.types import Json


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """One piece of a constrained output, in order: a literal, or a JSON value of `schema`.

    A literal is exact token ids where the family has a marker token (`token_id`), else text, tokenised freely.
    """

    text: str = ""
    token_id: int | None = None
    schema: Mapping[str, Json] | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an output must look like, engine-neutral: one of `alternatives`, once or (with `repeat`) one to many times.

    Between repetitions stands `separator`. After the last part only an end token may follow.
    """

    alternatives: tuple[tuple[GrammarPart, ...], ...]
    repeat: bool = False
    separator: str = ""
