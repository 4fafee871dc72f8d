"""Logprobs as a trainer computes them: a forward pass of the model's own class over a batch, with images or without."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

MOST = 1e-3
"""How much a logprob may differ that a trainer computes again."""


@cache
def model_of(folder: Path) -> Any:
    """The model in `folder`, in float32 on the CPU."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype="float32").eval()


def logprobs(folder: Path, **inputs: Any) -> Any:
    """The logprob of each token of `input_ids` [B, L] after those before it, float32 [B, L]; 0 for the first of all.

    `inputs` are the arguments of the model's `forward`, as tensors or arrays.
    """
    import torch

    given = {name: torch.as_tensor(value) for name, value in inputs.items() if value is not None}
    ids = given["input_ids"]
    with torch.no_grad():
        logits = model_of(folder)(**given, use_cache=False).logits.float()
    found = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return torch.nn.functional.pad(found, (1, 0))


def difference(found: Any, expected: Any, mask: Any) -> float:
    """The greatest difference of two arrays [B, L] where `mask` is 1."""
    import torch

    on = torch.as_tensor(mask).bool()
    assert on.any()
    return float((torch.as_tensor(found)[on] - torch.as_tensor(expected)[on]).abs().max())
