"""The tokens of one turn, exactly as its session recorded them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """`prompt_ids`: all ids before the answer. `token_ids`: the sampled ids including the end token, with one logprob
    (natural logarithm) and one weight version for each. `logprobs` is None for an answer that was not sampled.
    """

    interaction_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float] | None
    versions: list[int]
    finish_reason: str

    @classmethod
    def of(cls, turn: Mapping[str, Any]) -> TurnTokens:
        """Read `GET /rl/sessions/{session}/interactions/{interaction}` with the parts ids and logprobs."""
        return cls(
            interaction_id=turn["interaction_id"],
            prompt_ids=turn["prompt_ids"],
            token_ids=turn["output_ids"],
            logprobs=turn["logprobs"],
            versions=_each(turn["versions"]),
            finish_reason=turn["finish_reason"],
        )


def _each(runs: Sequence[Sequence[int]]) -> list[int]:
    """One version for each token, from runs of (tokens, version)."""
    return [version for tokens, version in runs for _ in range(tokens)]
