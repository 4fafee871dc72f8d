"""Grammars for constrained output, independent of the library with which an engine enforces them.

`structural_tag` writes one for xgrammar, which SGLang and vLLM use.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.types import Json


@dataclass(frozen=True, slots=True)
class GrammarPart:
    """One piece of a constrained output: a literal, a JSON value, or a text that matches a pattern.

    `schema`: if set, a JSON value that matches this schema. `regex`, `ebnf`: if set, a text that this regular
    expression or grammar (xgrammar's EBNF) matches as a whole. `token_id`: if set, exactly this marker token. `text`:
    otherwise, a literal text in any tokenisation.
    """

    text: str = ""
    token_id: int | None = None
    schema: Mapping[str, Json] | None = None
    regex: str | None = None
    ebnf: str | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of a constrained output: one of `alternatives`, or with `repeat` one or more in a row.

    `separator`: the text between repetitions. Only an end token may follow the last part. `param`: the request field
    that demands it, for errors.
    """

    alternatives: tuple[tuple[GrammarPart, ...], ...]
    repeat: bool = False
    separator: str = ""
    param: str = "tools"


def structural_tag(grammar: Grammar) -> str:
    """Return a grammar as an xgrammar structural tag, in JSON."""
    choices = [_sequence([_part(part) for part in parts]) for parts in grammar.alternatives]
    once = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    if not grammar.repeat:
        return json.dumps({"type": "structural_tag", "format": once})
    again = _sequence([*_separator(grammar), once])
    return json.dumps({"type": "structural_tag", "format": _sequence([once, {"type": "star", "content": again}])})


def _separator(grammar: Grammar) -> list[Any]:
    return [{"type": "const_string", "value": grammar.separator}] if grammar.separator else []


def _part(part: GrammarPart) -> Any:
    if part.schema is not None:
        return {"type": "json_schema", "json_schema": dict(part.schema), "max_whitespace_cnt": 1}
    if part.regex is not None:
        return {"type": "regex", "pattern": part.regex}
    if part.ebnf is not None:
        return {"type": "grammar", "grammar": part.ebnf}
    if part.token_id is not None:
        return {"type": "token", "token": part.token_id}
    return {"type": "const_string", "value": part.text}


def _sequence(elements: Sequence[Any]) -> Any:
    return elements[0] if len(elements) == 1 else {"type": "sequence", "elements": list(elements)}
