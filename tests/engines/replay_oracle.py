"""An oracle of side columns: one forward pass over a whole sequence in float64, and plain definitions of what is kept.

It shares nothing with the engine: no cache, no batch, no hooks on experts (it reads what routers return).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.rows import SideRows
from proxy.types import SamplingParams

CLOSE = 1e-5
"""How far logprobs in float32 may be from those in float64."""


class Pass(NamedTuple):
    """One pass. `logits`: float64 [tokens, vocabulary]. `experts`: [tokens, layers, k], in ascending order. `sure`:
    bool [tokens], whether passes in float32 and in float64 choose the same experts.
    """

    logits: NDArray[np.float64]
    experts: NDArray[np.int64]
    sure: NDArray[np.bool_]


@lru_cache(maxsize=64)
def forward(folder: Path, ids: tuple[int, ...]) -> Pass:
    """The pass of the model in `folder` over a whole sequence."""
    logits, experts = _run(str(folder), "float64", ids)
    _, rounded = _run(str(folder), "float32", ids)
    return Pass(logits, experts, (experts == rounded).reshape(len(ids), -1).all(axis=1))


def _run(folder: str, dtype: str, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    import torch

    model = _model(folder, dtype)
    chosen: list[Any] = []
    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [each.register_forward_hook(lambda _m, _a, output: chosen.append(output[2])) for each in routers]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    rows = torch.stack(chosen, 1).sort(-1).values.numpy() if chosen else np.zeros((len(ids), 0, 0), np.int64)
    return logits.double().numpy(), rows


@lru_cache(maxsize=8)
def _model(folder: str, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


class Kept(NamedTuple):
    """What may be kept at one place: `least` must be, nothing outside `most` may be; bool [vocabulary]. They differ
    where a token is so close to a limit that rounding decides. `scores`: float64 [vocabulary], the shaped logits.
    """

    least: NDArray[np.bool_]
    most: NDArray[np.bool_]
    scores: NDArray[np.float64]


def kept(logits: NDArray[np.float64], sampling: SamplingParams, allowed: NDArray[np.bool_] | None = None) -> Kept:
    """The tokens that a sampler without penalties keeps of one row of logits. `allowed`: those of a grammar."""
    scores = logits / (sampling.temperature or 1.0)
    if allowed is not None:
        scores = np.where(allowed, scores, -np.inf)
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    if not sampling.temperature:
        return Kept(probs > 0, probs > 0, scores)
    found = [
        _truncated(probs, sampling.top_p + by, sampling.top_k, sampling.min_p * (1 - 10 * by)) for by in (-1e-6, 1e-6)
    ]
    close = probs >= np.sort(probs)[::-1][found[1].sum() - 1] * (1 - 1e-5)  # as likely as the least likely
    return Kept(found[0] & found[1], found[1] | (close if sampling.top_k > 0 else False) & (probs > 0), scores)


def _truncated(probs: NDArray[np.float64], top_p: float, top_k: int, min_p: float) -> NDArray[np.bool_]:
    order = np.argsort(-probs, kind="stable")
    before = np.cumsum(probs[order]) - probs[order]
    keep = (before < top_p) & (probs[order] >= min_p * probs.max()) & (probs[order] > 0)
    if top_k > 0:
        keep[top_k:] = False
    keep[0] = True
    mask = np.zeros(len(probs), bool)
    mask[order[keep]] = True
    return mask


def masks(rows: SideRows, vocab_size: int) -> list[NDArray[np.bool_] | None]:
    """Ragged rows as masks, bool [vocabulary]; None for a missing row."""
    assert rows.counts is not None
    found: list[NDArray[np.bool_] | None] = []
    for count, ids in zip(rows.counts.tolist(), rows.sets(), strict=True):
        mask = np.full(vocab_size, count < 0)
        mask[ids] = count > 0
        found.append(mask if count else None)
    return found


def check_kept(
    folder: Path,
    prompt: Sequence[int],
    output: Sequence[int],
    rows: SideRows,
    logprobs: Sequence[float],
    sampling: SamplingParams,
    allowed: Sequence[NDArray[np.bool_]] = (),
) -> None:
    """Assert that each kept set is the one of a forward pass, and each logprob is the token's within it."""
    logits = forward(folder, (*prompt, *output)).logits[len(prompt) - 1 : -1]
    found = masks(rows, logits.shape[1])
    assert len(found) == len(logprobs) == len(output)
    for place, (token, mask) in enumerate(zip(output, found, strict=True)):
        expected = kept(logits[place], sampling, allowed[place] if len(allowed) else None)
        assert mask is not None and mask[token]
        assert not (expected.least & ~mask).any() and not (mask & ~expected.most).any()
        within = expected.scores[mask]
        behaviour = expected.scores[token] - within.max() - np.log(np.exp(within - within.max()).sum())
        assert abs(logprobs[place] - behaviour) < CLOSE


def check_experts(passes: Sequence[Pass], owner: Sequence[int], rows: NDArray[Any]) -> None:
    """Assert that row i has the experts of token i in pass `owner[i]`, in any order."""
    sure = 0
    for place, number in enumerate(owner):
        if passes[number].sure[place]:
            assert np.array_equal(np.sort(rows[place].astype(np.int64), axis=-1), passes[number].experts[place])
            sure += 1
    assert sure >= 0.9 * len(owner)
