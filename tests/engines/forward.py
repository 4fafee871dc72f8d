"""Independent reference: logprobs by plain forward passes of the same weights, without a cache."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

TOLERANCE = 1e-4


def plain_logprobs(folder: Path, prompt: array, output: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Logprobs of `output` after `prompt`, by one forward pass."""
    import torch

    with torch.no_grad():
        logits = _model(str(folder))(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return logprobs[range(len(output)), list(output)].tolist()


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
