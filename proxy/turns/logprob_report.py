"""Logprobs of visible tokens, for clients that request them: each is streamed once; a unary reply has them all."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from proxy.rendering.deltas import Delta, TextDelta, TokenLogprob
from proxy.types import TurnRequest


@dataclass(slots=True)
class LogprobReport:
    """Collects logprobs. `piece` returns the bytes of a token; `hidden` are the end tokens, which clients never see.

    `names_ids`: the token of an entry is written as `token_id:N`, as in vLLM, instead of as text.
    """

    piece: Callable[[int], bytes]
    hidden: Collection[int]
    names_ids: bool = False
    entries: list[TokenLogprob] = field(default_factory=list)
    _unreported: list[TokenLogprob] = field(default_factory=list)

    def add(self, token: int, logprob: float, top: tuple[tuple[int, float], ...] = ()) -> None:
        """Add a token with its logprob and the likeliest alternatives, highest first. Hidden tokens are ignored."""
        if token in self.hidden:
            return
        entry = self._entry(token, logprob, tuple(self._entry(other, value) for other, value in top))
        self.entries.append(entry)
        self._unreported.append(entry)

    def attach(self, delta: Delta) -> Delta:
        """Return the delta. A text delta gets all logprobs that no earlier delta has."""
        if not isinstance(delta, TextDelta) or not self._unreported:
            return delta
        return TextDelta(delta.text, self.unreported())

    def unreported(self) -> tuple[TokenLogprob, ...]:
        """Return the logprobs that no earlier delta has. The caller must add them to a delta."""
        taken = tuple(self._unreported)
        self._unreported.clear()
        return taken

    def _entry(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        utf8 = self.piece(token)
        text = f"token_id:{token}" if self.names_ids else utf8.decode("utf-8", "replace")
        return TokenLogprob(text, utf8, logprob, top)


def new_report(request: TurnRequest, ends: Collection[int], piece: Callable[[int], bytes]) -> LogprobReport:
    """Return the report of a choice. `ends`: the token ids that end its output."""
    return LogprobReport(piece, () if request.per_token else ends, request.names_ids)
