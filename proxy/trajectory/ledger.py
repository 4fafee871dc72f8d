"""The ledger of a session's export: whether each sampled token is trained, and why not.

A token is trained in exactly one sample, or it has exactly one reason why it is not trained. The counts therefore add
up to the number of sampled tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.selection import marked
from proxy.types import Interaction
from tokengrove.reasons import Untrained

BoolArray = NDArray[np.bool_]

# The state of a token, one byte. States up to _LAST_OPEN may still change: the greater state wins.
_CODES = {reason: code for code, reason in enumerate(Untrained, 1)}
_REASONS = {code: reason for reason, code in _CODES.items()}
_LAST_OPEN = _CODES[Untrained.STALE]
_TRAINED = len(_CODES) + 1
_PLACEHOLDER = _CODES[Untrained.PLACEHOLDER]


@dataclass(frozen=True, slots=True)
class Ledger:
    """`states`: uint8 [output] by interaction id. Zero: no sample has used the token yet. `masked`: the stale tokens
    that no sample trains, bool [output] by interaction id."""

    states: dict[str, NDArray[np.uint8]]
    masked: dict[str, BoolArray] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        interactions: Collection[Interaction],
        excluded: Mapping[str, Untrained],
        placeholders: Collection[int] = (),
    ) -> Ledger:
        """The ledger before the first sample. `excluded`: why turns are not trained, by id. `placeholders`: the ids of
        tokens that stand for images; a sampled placeholder stands for no image and is not trained."""
        ledger = cls({each.id: _opening(each, excluded.get(each.id)) for each in interactions})
        if placeholders:
            for each in interactions:
                state = ledger.states[each.id]
                state[np.isin(np.asarray(each.output_ids), list(placeholders)) & (state == 0)] = _PLACEHOLDER
        return ledger

    def open(self, name: str) -> BoolArray:
        """The tokens of an output that are to be trained and that no sample trains yet, bool [output]."""
        tokens = self.states[name] <= _LAST_OPEN
        return tokens & ~self.masked[name] if name in self.masked else tokens

    def mask(self, name: str, stale: BoolArray) -> None:
        """Let no sample train these tokens of an output, bool [output]. Those that are open are counted as stale."""
        self.masked[name] = stale
        self.leave_out(name, Untrained.STALE, stale)

    def train(self, name: str, tokens: BoolArray) -> None:
        """Record that a sample trains these tokens of an output, bool [output]."""
        self.states[name][tokens] = _TRAINED

    def leave_out(self, name: str, reason: Untrained, tokens: BoolArray | None = None) -> None:
        """Record why a sample does not train these tokens of an output, bool [output]; None: all of them."""
        state = self.states[name]
        np.maximum(state, _CODES[reason], out=state, where=True if tokens is None else tokens)

    def runs(self, name: str) -> list[tuple[int, int, Untrained | None]]:
        """The runs [first, end) of an output's tokens, each with the reason why it is not trained, None if it is."""
        state = self.states[name]
        return [(first, end, _REASONS.get(int(state[first]))) for first, end in equal_runs(state)]

    def sampled(self) -> int:
        """The number of sampled tokens."""
        return sum(len(state) for state in self.states.values())

    def trained(self) -> int:
        """The number of tokens that are trained."""
        return int(self._counts()[_TRAINED])

    def trained_of(self, name: str) -> int:
        """The number of tokens of an output that are trained."""
        return int((self.states[name] == _TRAINED).sum())

    def turns_with(self, reason: Untrained) -> int:
        """The number of turns with a token that is not trained for this reason."""
        return sum(bool((state == _CODES[reason]).any()) for state in self.states.values())

    def untrained(self) -> dict[str, int]:
        """The numbers of tokens that are not trained, by reason; reasons without a token are left out."""
        counts = self._counts()
        return {reason.value: int(counts[code]) for reason, code in _CODES.items() if counts[code]}

    def _counts(self) -> NDArray[np.intp]:
        states = list(self.states.values())
        return np.bincount(np.concatenate(states) if states else np.zeros(0, np.uint8), minlength=_TRAINED + 1)


def equal_runs(values: NDArray[Any]) -> list[tuple[int, int]]:
    """The runs [first, end) of equal values, in order."""
    if not len(values):
        return []
    changes = (np.flatnonzero(values[1:] != values[:-1]) + 1).tolist()
    return list(zip([0, *changes], [*changes, len(values)], strict=True))


def _opening(interaction: Interaction, excluded: Untrained | None) -> NDArray[np.uint8]:
    """The initial states of an output. Tokens outside the marks have the reason `mark`, which comes first."""
    length = len(interaction.output_ids)
    if excluded not in (None, Untrained.LOGPROBS, Untrained.GRAMMAR):
        return np.full(length, _CODES[excluded], np.uint8)
    inside = 0 if excluded is None else _CODES[excluded]
    return np.where(marked(interaction), inside, _CODES[Untrained.MARK]).astype(np.uint8)
