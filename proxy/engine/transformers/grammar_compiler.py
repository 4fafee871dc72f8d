"""Grammars compiled with llguidance: after each token, the mask allows exactly the tokens that can still fit.

An output is completed within its token budget if possible, whatever the weights: white space between JSON tokens is at
most one space, and when the budget runs short, the mask is narrowed to tokens that lead to the end (`steering`). Added
tokens of the tokenizer (markers, end tokens) are allowed only where the grammar names them by id, never inside text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.engine.transformers.steering import Steering, skeleton
from tokengrove.errors import ConfigurationError, InvalidRequest

# At most one space, as models write JSON. Otherwise a random model could write white space forever.
_JSON_OPTIONS = {"whitespace_pattern": " ?"}

# What a regular expression between slashes, on one line, has instead; escaped characters are one piece.
_PIECES = re.compile(r"\\.|[/\n\r]", re.DOTALL)
_INSTEAD = {"/": r"\/", "\n": r"\n", "\r": r"\r", "\\\n": r"\n", "\\\r": r"\r"}

_SLACK_TOKENS = 16
"""Tokens added to the reserve, for an incomplete character or key, the end token, and finer tokenisation."""


class GrammarCompiler:
    """Compiles grammars for the tokenizer of `folder`, and caches the latest 256."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises ConfigurationError if `folder` has no tokenizer.json, or llguidance cannot use it."""
        self._tokenizer = _load_tokenizer(folder, vocab_size)
        self._vocab_size = vocab_size
        self._steering: Steering | None = None
        self._compile = lru_cache(maxsize=256)(self._compile_source)

    def compile(self, grammar: Grammar, stop_token_ids: tuple[int, ...]) -> GrammarState:
        """Return the state of an output that ends with one of `stop_token_ids`. Raises InvalidRequest."""
        if not stop_token_ids:
            raise _invalid(grammar, "needs at least one stop token, which ends the output")
        try:
            source, skeletons = _source(grammar), _skeletons(grammar)
            matcher, reserve = self._compile(source, skeletons, _marker_ids(grammar))
        except RecursionError:
            raise _invalid(grammar, "is nested too deeply") from None
        except ValueError as error:
            raise _invalid(grammar, f"cannot be compiled to a grammar: {error}") from None
        steering = self._steering = self._steering or Steering(self._token_bytes())
        end_ids = (self._tokenizer.eos_token, *stop_token_ids)
        markers = _marker_ids(grammar)
        return GrammarState(matcher.deep_copy(), steering, stop_token_ids, end_ids, markers, reserve, self._vocab_size)

    def _compile_source(self, source: str, skeletons: tuple[str, ...], markers: tuple[int, ...]) -> tuple[Any, int]:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, source, log_level=0)
        tried = matcher.deep_copy()
        if not tried.is_error():
            tried.compute_bitmask()  # detects errors that compiling does not, such as circular references
        if tried.is_error():
            raise ValueError(_reason(tried.get_error()))
        lengths = [len(self._tokenizer.tokenize_str(text)) for text in skeletons]
        return matcher, max(lengths) + len(markers) + _SLACK_TOKENS if lengths else 0

    def _token_bytes(self) -> list[bytes]:
        tokenizer = self._tokenizer
        return [
            b"" if tokenizer.is_special_token(token) else tokenizer.decode_bytes([token])
            for token in range(self._vocab_size)
        ]


@dataclass(slots=True, eq=False)
class GrammarState:
    """The state of one constrained output. Implements `sampler.TokenMask`.

    llguidance marks the end with the tokenizer's own end token, so `end_ids` are removed from its mask, and the
    request's `stop_token_ids` are allowed once the output is complete. `reserve`: the number of remaining tokens at
    which narrowing begins.
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
        """Bool array [vocabulary] of the allowed tokens. `remaining`: tokens left. Raises ValueError on failure."""
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
        """Advance by one sampled token. Raises ValueError if the grammar does not allow it."""
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
    """Load the tokenizer for llguidance, with all added tokens marked as special, so that none matches text."""
    from llguidance import LLTokenizer

    try:
        data = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        data["truncation"] = data["padding"] = None
        added = data.get("added_tokens", [])
        for token in added:
            token["special"] = True
        return LLTokenizer(json.dumps(data), n_vocab=vocab_size, eos_token=added[0]["id"] if added else 0)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"llguidance cannot use the tokenizer in {folder} for constrained output: {error}"
        ) from error


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's Lark dialect. Raises ValueError if it has no alternative, or an empty one."""
    if not grammar.alternatives or not all(grammar.alternatives):
        raise ValueError("the grammar has no alternatives, or an empty one")
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
        elif part.regex is not None:
            rules.append(f"regex_{len(rules)}: /{_regex_text(part.regex)}/")
            terms.append(f"regex_{len(rules) - 1}")
        elif part.ebnf is not None:
            rules.append(f"ebnf_{len(rules)}: %lark {{\n{_lark_text(part.ebnf)}\n}}")
            terms.append(f"ebnf_{len(rules) - 1}")
        elif part.token_id is not None:
            terms.append(f"<[{part.token_id}]>")
        elif part.text:
            terms.append(_literal(part.text))
    return " ".join(terms) or '""'


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _regex_text(pattern: str) -> str:
    """A regular expression between slashes, on one line."""
    return _PIECES.sub(lambda found: _INSTEAD.get(found[0], found[0]), pattern)


def _lark_text(ebnf: str) -> str:
    """A grammar in EBNF as llguidance's Lark dialect. Raises ValueError if it is malformed."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    lines: list[str] = []
    for line in ebnf.splitlines():
        # xgrammar lets an alternative begin on the next line, llguidance does not.
        if line.lstrip().startswith("|") and lines and "#" not in lines[-1]:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    try:
        return str(gbnf_to_lark("\n".join(lines)))
    except Exception as error:  # besides its own class, it raises bare ones
        raise ValueError(str(error)) from None


def _invalid(grammar: Grammar, message: str) -> InvalidRequest:
    return InvalidRequest(f"'{grammar.param}' {message}", param=grammar.param)


def _reason(error: str) -> str:
    """The reason in an error of llguidance: the line after a quoted regular expression, else the first line."""
    lines = [line.strip() for line in error.split("<state>")[0].strip().splitlines()]
    return next((line for line in lines if line.startswith("error: ")), lines[0])


def _schema_text(schema: Mapping[str, Any]) -> str:
    return json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False)


def _marker_ids(grammar: Grammar) -> tuple[int, ...]:
    parts = (part for parts in grammar.alternatives for part in parts)
    return tuple(sorted({part.token_id for part in parts if part.token_id is not None}))


def _skeletons(grammar: Grammar) -> tuple[str, ...]:
    """An estimate of the longest output of each alternative, for which tokens are reserved.

    Empty with a pattern: the steering to the end is for JSON.
    """
    if any(part.regex is not None or part.ebnf is not None for parts in grammar.alternatives for part in parts):
        return ()
    return tuple(
        "".join(skeleton(part.schema) if part.schema is not None else part.text for part in parts)
        for parts in grammar.alternatives
    )
