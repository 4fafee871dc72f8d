"""Logprobs of visible tokens for clients that ask for them: streamed once each, and all together in a unary reply."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from proxy.rendering.deltas import Delta, TextDelta, TokenLogprob


@dataclass(slots=True)
class LogprobReport:
    """Collects logprobs. `piece` gives the bytes of a token; `hidden` are end tokens, which clients never see."""

    piece: Callable[[int], bytes]
    hidden: Collection[int]
    entries: list[TokenLogprob] = field(default_factory=list)
    _unreported: list[TokenLogprob] = field(default_factory=list)

    def add(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> None:
        """Add a visible token with its logprob and the likeliest alternatives, highest first."""
        if token in self.hidden:
            return
        entry = self._entry(token, logprob, tuple(self._entry(other, value) for other, value in top))
        self.entries.append(entry)
        self._unreported.append(entry)

    def attach(self, delta: Delta) -> Delta:
        """Return the delta; a text delta carries all logprobs that no delta carried before."""
        if not isinstance(delta, TextDelta) or not self._unreported:
            return delta
        delta = TextDelta(delta.text, tuple(self._unreported))
        self._unreported.clear()
        return delta

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        utf8 = self.piece(token)
        return TokenLogprob(utf8.decode("utf-8", "replace"), utf8, logprob, top)
