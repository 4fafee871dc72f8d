"""A policy-gradient trainer on exported samples: the clipped PPO objective with the exported advantages and weights.

Before the first step on a batch, the trainer's own logprobs must equal the exported ones: each importance ratio is 1
within `RATIO_TOLERANCE`. That holds only if every token, mask and logprob of the samples is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client import Export, Sample
from tokengrove.client.values import Json
from tokengrove.errors import ProxyError

if TYPE_CHECKING:
    import torch

RATIO_TOLERANCE = 1e-3
_CLIP = 0.2
_PASSES = 3
"""Passes over each batch; from the second on, ratios differ from 1 and are clipped."""
_LEARNING_RATE = 5e-3
_ENTROPY = 0.05
"""Weight of the entropy bonus. Without it, the tiny model soon answers everything with its first lucky word."""
_MOST_GRADIENT = 1.0


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """Result of training on one batch.

    `reward`: mean score of its sessions. `ratio_error`: largest |ratio - 1| in the first pass. `tokens`: number of
    trained tokens.
    """

    reward: float
    ratio_error: float
    tokens: int


class Trainer:
    """A trainer with its own copy of the weights in `folder`, a Hugging Face model, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=_LEARNING_RATE)

    def learn(self, batch: Export) -> TrainingStep:
        """Update the weights with samples of layout concat. Raises ProxyError unless these weights sampled them.

        Maximizes w min(r A, clip(r, 0.8, 1.2) A), Schulman et al. 2017, "Proximal Policy Optimization", equation 7,
        plus an entropy bonus, averaged over all tokens of the mask. A is a sample's advantage within its group, w its
        share of its session.
        """
        import torch

        tensors = batch.to_torch()
        trained = tensors["loss_mask"][:, 1:] == 1
        exported = tensors["logprobs"][:, 1:][trained]
        heat = torch.from_numpy(temperatures(batch.samples))[:, 1:][trained]
        advantage = torch.from_numpy(weighted_advantages(batch.samples)).unsqueeze(1).expand_as(trained)[trained]
        ratio_error = 0.0
        for number in range(_PASSES):
            logprobs, entropy = self._evaluate(tensors, trained, heat)
            ratio = (logprobs - exported).exp()
            if number == 0:
                ratio_error = _checked(ratio.detach())
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantage)
            self._step(-gain.mean() - _ENTROPY * entropy.mean())
        return TrainingStep(mean_score(batch.sessions), ratio_error, len(exported))

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors into `folder`, for a server to load."""
        self._model.save_pretrained(folder)

    def _evaluate(
        self, tensors: dict[str, torch.Tensor], trained: torch.Tensor, heat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The logprob and entropy of each trained token [n], at its sampling temperature."""
        ids = tensors["input_ids"].long()
        logits = self._model(input_ids=ids, attention_mask=tensors["attention_mask"]).logits[:, :-1][trained]
        logprobs = (logits / heat.unsqueeze(1)).log_softmax(-1)
        chosen = logprobs.gather(1, ids[:, 1:][trained].unsqueeze(1)).squeeze(1)
        return chosen, -(logprobs.exp() * logprobs).sum(-1)

    def _step(self, loss: torch.Tensor) -> None:
        import torch

        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _MOST_GRADIENT)
        self._optimizer.step()


def _checked(ratio: torch.Tensor) -> float:
    """Largest |ratio - 1| of the first ratios [n]. Raises ProxyError above the tolerance, or without ratios."""
    error = float((ratio - 1).abs().max()) if len(ratio) else float("nan")
    if not error <= RATIO_TOLERANCE:
        raise ProxyError(
            f"a first importance ratio of the batch differs from 1 by {error:.3g}, more than {RATIO_TOLERANCE:g}: its "
            "tokens or logprobs are not those of the trainer's weights"
        )
    return error


def mean_score(sessions: Mapping[str, Mapping[str, Json]]) -> float:
    """The mean score of an export's sessions, each counted once, however many samples it has; NaN without scores."""
    scores = [entry["score"] for entry in sessions.values() if entry["score"] is not None]
    return float(np.mean(scores)) if scores else float("nan")


def temperatures(samples: Sequence[Sample]) -> NDArray[np.float32]:
    """The temperature of each trained token, float32 [B, tokens of the longest]. 0 counts as 1, as for logprobs."""
    of_turns = [[turn["sampling"].get("temperature", 1.0) or 1.0 for turn in sample.turns] for sample in samples]
    rows = [sample.per_token(values) for sample, values in zip(samples, of_turns, strict=True)]
    filled = np.zeros((len(rows), max(map(len, rows), default=0)), np.float32)
    for line, row in zip(filled, rows, strict=True):
        line[: len(row)] = row
    return filled


def weighted_advantages(samples: Sequence[Sample]) -> NDArray[np.float32]:
    """Advantage times weight of each sample, float32 [B]. Raises ProxyError for samples without advantages."""
    if any(sample.advantage is None for sample in samples):
        raise ProxyError("the samples have no advantages; export them with advantages='grpo'")
    return np.array([(sample.advantage or 0.0) * sample.weight for sample in samples], np.float32)
