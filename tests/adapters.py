"""LoRA adapters with random weights in PEFT's layout, and the logprobs that PEFT itself computes with them."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The target modules of most families."""
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
"""The target modules of DeepSeek's attention."""


def write_adapter(
    model: Path,
    folder: Path,
    seed: int = 0,
    *,
    targets: Sequence[str] | str = ATTENTION,
    scale: float = 0.2,
    **lora: Any,
) -> Path:
    """Write an adapter of the model in `model`, with random A and B whose values are about `scale`; return `folder`.

    `lora`: further fields of `LoraConfig`. The default rank is 4. Equal seeds give equal weights.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    named = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", "target_modules": named, **lora})
    drawn = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(_base(model), config)
        for name, weight in sorted(adapted.named_parameters()):
            if "lora_" in name:
                weight.data.copy_(torch.randn(weight.shape, generator=drawn) * scale)
        adapted.save_pretrained(folder)
    return folder


def adapter_logprobs(
    model: Path, adapter: Path | None, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Logprobs of `output` after `prompt`, by one forward pass of PEFT's model; `adapter` None: of the base model."""
    import torch

    with torch.no_grad():
        given = torch.tensor([[*prompt, *output]])
        logits = adapted_model(model, adapter)(given, use_cache=False).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
    return [float(value) for value in logprobs[range(len(output)), list(output)]]


def _base(model: Path) -> Any:
    from proxy.engine.transformers.loading import read_model

    return read_model(model, "cpu")


@lru_cache(maxsize=16)
def adapted_model(model: Path, adapter: Path | None) -> Any:
    """PEFT's model with an adapter, in float32; the base model without one."""
    from peft import PeftModel

    if adapter is None:
        return _base(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(_base(model), adapter).eval()
