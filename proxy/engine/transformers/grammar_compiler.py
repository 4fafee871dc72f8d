"""Grammars compiled for llguidance: after each token, exactly the tokens that can still lead to a well-formed output.

Whatever the weights, an output closes within its budget if it can: white space between JSON tokens is at most one
space, and when the budget gets short the mask narrows to what brings the end nearer (`steering.py`). Added tokens of
the tokenizer (markers, end tokens) come only where the grammar names them by id, never inside of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.transformers.steering import Steering, skeleton
from proxy.errors import ConfigurationError, InvalidRequest

# Compact or with one space, as models write it: nothing that a random model could go on with for ever.
_JSON_OPTIONS = {"whitespace_pattern": " ?"}

_SLACK_TOKENS = 16
"""Added to a reserve: a half-written character or key, the end token, pieces that are split more finely than usual."""


class GrammarCompiler:
    """Compiles `Grammar`s for one tokenizer; the latest are kept. `folder` holds a `tokenizer.json`."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises ConfigurationError when the folder has no fast tokenizer or llguidance cannot use it."""
        self._tokenizer = _load_tokenizer(folder, vocab_size)
        self._vocab_size = vocab_size
        self._steering: Steering | None = None
        self._compile = lru_cache(maxsize=256)(self._compile_source)

    def compile(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarState:
        """A fresh state that ends with one of `stop_token_ids`. Raises InvalidRequest naming `tools`."""
        if not stop_token_ids:
            raise InvalidRequest("a grammar needs a token that ends the output", param="tools")
        matcher, reserve = self._compile(_source(grammar), _skeletons(grammar), _marker_ids(grammar))
        steering = self._steering = self._steering or Steering(self._token_bytes())
        end_ids = (self._tokenizer.eos_token, *stop_token_ids)
        markers = _marker_ids(grammar)
        return GrammarState(matcher.deep_copy(), steering, stop_token_ids, end_ids, markers, reserve, self._vocab_size)

    def _compile_source(self, source: str, skeletons: tuple[str, ...], markers: tuple[int, ...]) -> tuple[Any, int]:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().split("<state>")[0].strip().splitlines()[0]
            raise InvalidRequest(f"tools: no grammar can be made of these schemas: {reason}", param="tools")
        lengths = [len(self._tokenizer.tokenize_str(text)) for text in skeletons]
        return matcher, max(lengths) + len(markers) + _SLACK_TOKENS

    def _token_bytes(self) -> list[bytes]:
        tokenizer = self._tokenizer
        return [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(self._vocab_size)
        ]


@dataclass(slots=True, eq=False)
class GrammarState:
    """How far one output has come. Implements what the sampler asks of a mask.

    llguidance marks an end by the tokenizer's own end token; `end_ids` are taken out of its mask, and the request's
    `stop_token_ids` put in, where the output is complete.
    """

    matcher: Any
    steering: Steering
    stop_token_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    marker_ids: tuple[int, ...]
    reserve: int
    vocab_size: int
    in_string: bool = False
    escaped: bool = False
    ended: bool = False

    def allowed(self, remaining: int) -> Any:
        """Bool array [vocabulary]; `remaining` is the budget in tokens. Raises ValueError once the state is broken."""
        import numpy as np

        complete = self.matcher.is_accepting()
        if self.matcher.is_stopped() or (complete and remaining <= self.reserve):
            mask = np.zeros(self.vocab_size, dtype=bool)
        else:
            mask = self._grammar_mask()
            if remaining <= self.reserve:
                return self._narrowed(mask)
        if complete:
            mask[list(self.stop_token_ids)] = True
        return mask

    def accept(self, token: int) -> None:
        """Move on by one sampled token. Raises ValueError when the grammar did not allow it."""
        if token in self.stop_token_ids and self.matcher.is_accepting():
            self.ended = True
            return
        if not self.matcher.consume_token(token):
            raise ValueError(f"the grammar does not allow token {token} here")
        self.in_string, self.escaped = self.steering.scan(token, self.in_string, self.escaped)

    def _grammar_mask(self) -> Any:
        import numpy as np

        packed = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.uint8)
        if self.matcher.is_error():
            raise ValueError(f"the grammar failed: {self.matcher.get_error().splitlines()[0]}")
        mask = np.unpackbits(packed, bitorder="little")[: self.vocab_size].astype(bool)
        mask[[token for token in self.end_ids if token not in self.marker_ids]] = False
        return mask

    def _narrowed(self, mask: Any) -> Any:
        import numpy as np

        forced = self.matcher.compute_ff_tokens()
        if forced and mask[forced[0]]:
            only = np.zeros_like(mask)
            only[forced[0]] = True
            return only
        return self.steering.narrow(mask, self.in_string, self.marker_ids)


def _load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """The llguidance tokenizer, with every added token special, so that none of them can be part of a text."""
    from llguidance import LLTokenizer

    try:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        data["truncation"] = data["padding"] = None
        added = data.get("added_tokens", [])
        for token in added:
            token["special"] = True
        return LLTokenizer(json.dumps(data), n_vocab=vocab_size, eos_token=added[0]["id"] if added else 0)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"no grammar support for the tokenizer in {folder}: {error}") from error


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's dialect of Lark. Raises InvalidRequest when there is nothing to choose from."""
    if not grammar.alternatives or not all(grammar.alternatives):
        raise InvalidRequest("tools: a grammar without alternatives, or with an empty one", param="tools")
    rules: list[str] = []
    choices = [_sequence(parts, rules) for parts in grammar.alternatives]
    item = "item: " + " | ".join(choices)
    again = f" ({_literal(grammar.separator)} item)*" if grammar.separator else " item*"
    return "\n".join([f"start: item{again if grammar.repeat else ''}", item, *rules]) + "\n"


def _sequence(parts: tuple[GrammarPart, ...], rules: list[str]) -> str:
    terms = []
    for part in parts:
        if part.schema is not None:
            rules.append(f"json_{len(rules)}: %json {_schema_text(part.schema)}")
            terms.append(f"json_{len(rules) - 1}")
        elif part.token_id is not None:
            terms.append(f"<[{part.token_id}]>")
        elif part.text:
            terms.append(_literal(part.text))
    return " ".join(terms) or '""'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _marker_ids(grammar: Grammar) -> tuple[int, ...]:
    parts = (part for parts in grammar.alternatives for part in parts)
    return tuple(sorted({part.token_id for part in parts if part.token_id is not None}))


def _skeletons(grammar: Grammar) -> tuple[str, ...]:
    """A long plain output of each alternative: what may have to be written before the end."""
    return tuple(
        "".join(skeleton(part.schema) if part.schema is not None else part.text for part in parts)
        for parts in grammar.alternatives
    )
