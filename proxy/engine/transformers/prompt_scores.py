"""Logprobs of the tokens of a prompt, from the steps that process it.

A prompt may be processed in several steps. Its scores are complete with the step that samples its first token, and all
are of one weight version: a resubmission starts again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.types import Ids, Logprobs

if TYPE_CHECKING:
    import torch


@dataclass(slots=True, eq=False)
class PromptScores:
    """The scores of one prompt so far.

    `ids`: the prompt. `temperature`: that of the request; 0 is taken as 1. `top`: the number of alternatives per token.
    `logprobs`, `tops`: of the tokens that were processed so far.
    """

    ids: Ids
    temperature: float
    top: int
    logprobs: Logprobs = field(default_factory=lambda: Logprobs("f"))
    tops: list[tuple[tuple[int, float], ...]] = field(default_factory=list)

    def start_again(self) -> None:
        """Forget all scores, before the prompt is processed again."""
        self.logprobs, self.tops = Logprobs("f"), []

    def add(self, logits: torch.Tensor, first: int) -> None:
        """Add the scores of the tokens from position `first` on. `logits`: float32, [tokens, vocabulary]."""
        import torch

        shaped = logits / self.temperature if self.temperature > 0.0 else logits
        logprobs = shaped.log_softmax(-1)
        ids = torch.tensor(self.ids[first : first + len(logits)], dtype=torch.long, device=logits.device)
        self.logprobs.extend(logprobs.gather(1, ids.unsqueeze(1)).squeeze(1).tolist())
        if self.top:
            values, tokens = logprobs.topk(min(self.top, logprobs.shape[1]))
            rows = zip(tokens.tolist(), values.tolist(), strict=True)
            self.tops.extend(tuple(zip(tokens, values, strict=True)) for tokens, values in rows)
