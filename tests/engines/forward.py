"""Independent reference: logprobs by plain forward passes of the same weights, without a cache."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from proxy.types import SamplingParams

TOLERANCE = 1e-4


def plain_logprobs(folder: Path, prompt: array, output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of `output` after `prompt`, by one forward pass."""
    import torch

    with torch.no_grad():
        logits = _model(str(folder))(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs[range(len(output)), list(output)].tolist()


def routed_experts(folder: Path, ids: Sequence[int], k: int) -> Any:
    """The `k` experts of each token in each layer, in ascending order, by one forward pass: [tokens, layers, k]."""
    import torch

    with torch.no_grad():
        logits = _model(str(folder))(torch.tensor([list(ids)]), output_router_logits=True).router_logits
    return torch.stack([layer.topk(k, dim=-1).indices.sort(-1).values for layer in logits], dim=1).numpy()


def logprobs_over_old_keys(old: Path, new: Path, prompt: array, output: Sequence[int], change: int) -> list[float]:
    """Logprobs of `output` if weights changed in place after `change` tokens: earlier tokens keep their old keys."""
    import torch

    ids = torch.tensor([[*prompt, *output]])
    if not change:
        return plain_logprobs(new, prompt, output)
    seen = len(prompt) + change - 1  # the last token was no input yet, so its keys are of the new weights
    with torch.no_grad():
        before = _model(str(old))(ids[:, :seen], use_cache=True)
        after = _model(str(new))(ids[:, seen:], past_key_values=before.past_key_values)
    logits = torch.cat([before.logits, after.logits], dim=1)[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1)[range(len(output)), list(output)].tolist()


def check_logprobs(
    folders: dict[int, Path],
    prompt: array,
    ids: Sequence[int],
    logprobs: Sequence[float],
    versions: Sequence[int],
    tolerance: float = TOLERANCE,
) -> None:
    """Assert that each logprob is that of the weights of its token's version; `folders`: weights by version."""
    of = {version: plain_logprobs(folders[version], prompt, ids) for version in set(versions)}
    expected = [of[version][place] for place, version in enumerate(versions)]
    assert list(logprobs) == pytest.approx(expected, abs=tolerance)


@lru_cache(maxsize=4)
def _model(folder: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32")


def logprobs_by(
    folder: Path,
    prompt: array,
    output: Sequence[int],
    sampling: SamplingParams,
    of: str,
    allowed: Sequence[Collection[int]] = (),
) -> list[float]:
    """Logprobs of `output` by one forward pass, of the distribution that `of` names (`LogprobsOf`).

    `allowed`: the tokens that a grammar allows at each place; empty without a grammar.
    """
    import torch

    with torch.no_grad():
        logits = _model(str(folder))(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1].clone()
    for row, tokens in zip(logits, allowed, strict=False):
        masked = torch.ones_like(row, dtype=torch.bool)
        masked[list(tokens)] = False
        row[masked] = -torch.inf
    if of != "model":
        for place, row in enumerate(logits):
            _change(row, list(prompt), list(output[:place]), sampling)
        logits /= sampling.temperature or 1.0
    if of == "sampled":
        for row in logits:
            _truncate(row, sampling)
    return logits.log_softmax(-1)[range(len(output)), list(output)].tolist()


def _change(row: Any, prompt: list[int], before: list[int], sampling: SamplingParams) -> None:
    """Apply bias and penalties to the logits of one place, in vLLM's order. The penalties are as OpenAI defines them,
    and the repetition penalty as Hugging Face does."""
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *before}:
        row[token] *= sampling.repetition_penalty if row[token] < 0 else 1.0 / sampling.repetition_penalty
    for token in set(before):
        row[token] -= sampling.frequency_penalty * before.count(token) + sampling.presence_penalty


def _truncate(row: Any, sampling: SamplingParams) -> None:
    """Exclude what min-p, top-k and top-p exclude, in vLLM's order."""
    probabilities = row.softmax(-1)
    row[probabilities < sampling.min_p * probabilities.max()] = -float("inf")
    if sampling.top_k > 0:
        row[row < row.topk(sampling.top_k).values[-1]] = -float("inf")
    ranked, order = row.softmax(-1).sort(descending=True)
    row[order[ranked.cumsum(-1) - ranked > sampling.top_p]] = -float("inf")
