"""A policy-gradient trainer that knows only exported samples: the clipped objective over group-relative advantages.

Before weights are touched, the trainer's own logprobs of a batch must be the exported ones: each ratio 1 within
`RATIO_TOLERANCE`. They can only be if every token, mask and logprob of the samples is exact.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.client import Export, Sample
from proxy.errors import ProxyError

if TYPE_CHECKING:
    import torch

RATIO_TOLERANCE = 1e-3
_CLIP = 0.2
_PASSES = 3
"""Over each batch: after the first, ratios have left 1, and the clip holds them."""
_LEARNING_RATE = 5e-3
_ENTROPY = 0.05
"""Without it a model as small as the built-in one soon answers everything with its first lucky word."""
_MOST_GRADIENT = 1.0
_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What one batch did: mean reward of its samples, how far its first ratios were from 1, tokens trained."""

    reward: float
    ratio_error: float
    tokens: int


class Trainer:
    """Owns a copy of the weights in `folder`, a Hugging Face model, in float32 on the CPU."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32", local_files_only=True)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=_LEARNING_RATE)

    def learn(self, batch: Export) -> TrainingStep:
        """Update the weights with samples of layout concat that they sampled. Raises ProxyError if a ratio is not 1.

        Maximizes min(r A, clip(r, 0.8, 1.2) A), Schulman et al. 2017, "Proximal Policy Optimization", equation 7,
        plus a little entropy, over all sampled tokens alike.
        """
        import torch

        tensors = batch.to_torch()
        trained = tensors["loss_mask"][:, 1:] == 1
        exported = tensors["logprobs"][:, 1:][trained]
        heat = torch.from_numpy(per_token(batch.samples, temperatures(batch.samples)))[:, 1:][trained]
        advantage = torch.from_numpy(per_token(batch.samples, advantages(batch.samples)))[:, 1:][trained]
        ratio_error = 0.0
        for number in range(_PASSES):
            logprobs, entropy = self._evaluate(tensors, trained, heat)
            ratio = (logprobs - exported).exp()
            if number == 0:
                ratio_error = _checked(ratio.detach())
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - _CLIP, 1 + _CLIP) * advantage)
            self._step(-gain.mean() - _ENTROPY * entropy.mean())
        return TrainingStep(float(tensors["rewards"].mean()), ratio_error, len(exported))

    def save(self, folder: Path) -> None:
        """Write config.json and model.safetensors into `folder`, for a server to load."""
        self._model.save_pretrained(folder)

    def _evaluate(
        self, tensors: dict[str, torch.Tensor], trained: torch.Tensor, heat: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each trained token [n] its logprob and the entropy, at the temperature that it was sampled with."""
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
    """How far the farthest of the first ratios [n] is from 1. Raises ProxyError beyond the tolerance, and for none."""
    error = float((ratio - 1).abs().max()) if len(ratio) else float("nan")
    if not error <= RATIO_TOLERANCE:
        raise ProxyError(
            f"the first importance ratio of a batch is {error:.3g} away from 1, more than {RATIO_TOLERANCE:g}: its "
            "tokens or logprobs are not those that the trainer's weights give"
        )
    return error


def temperatures(samples: Sequence[Sample]) -> list[list[float]]:
    """Of each turn of each sample. Logprobs at temperature 0 are those at 1."""
    return [[turn["sampling"].get("temperature", 1.0) or 1.0 for turn in sample.turns] for sample in samples]


def advantages(samples: Sequence[Sample]) -> list[list[float]]:
    """Of each turn (return - mean) / std among the turns at the same place in its group; 0 where all are equal.

    Shao et al. 2024, "DeepSeekMath", section 4.1.2, of returns instead of scores: what a turn leads to counts for it.
    """
    groups: dict[tuple[str | None, int], list[float]] = defaultdict(list)
    for sample in samples:
        for place, turn in enumerate(sample.turns):
            groups[sample.group_id, place].append(turn["return"])
    return [
        [_compared(turn["return"], groups[sample.group_id, place]) for place, turn in enumerate(sample.turns)]
        for sample in samples
    ]


def _compared(value: float, group: Sequence[float]) -> float:
    return float((value - np.mean(group)) / (np.std(group) + _EPSILON))


def per_token(samples: Sequence[Sample], values: Sequence[Sequence[float]]) -> NDArray[np.float32]:
    """Values of turns on the tokens that they sampled, 1 elsewhere: float32 [samples, tokens of the longest]."""
    filled = np.ones((len(samples), max((len(sample.input_ids) for sample in samples), default=0)), np.float32)
    for line, sample, of_turns in zip(filled, samples, values, strict=True):
        for turn, value in zip(sample.turns, of_turns, strict=True):
            if turn["span"] is not None:
                line[slice(*turn["span"])] = value
    return filled
