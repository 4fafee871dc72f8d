"""Latent attention (MLA, as DeepSeek has it) in the paged cache of transformers, which stores expanded keys and values.

The cache takes its width from `head_dim`, which in these models is only the rotary part of a key, and it has one width
for keys and values. Here it gets the larger of both, and the narrower are padded with zeros, which are cut off again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def cached_width(config: Any) -> int:
    """The width of a key or a value of one head in the cache, in numbers. `config`: that of the text model."""
    latent = _latent_width(config)
    return latent or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


@contextmanager
def widened(config: Any) -> Iterator[None]:
    """While the block runs, `config.head_dim` is the width of the cache, for a model with latent attention."""
    width = _latent_width(config)
    if not width:
        yield
        return
    rotary, config.head_dim = config.head_dim, width
    try:
        yield
    finally:
        config.head_dim = rotary


def pad_updates(cache: Any, config: Any) -> None:
    """Pad what layers write to `cache`, and cut what they read. No effect for a model without latent attention."""
    width = _latent_width(config)
    if not width:
        return
    update = cache.update

    def padded(
        key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from torch.nn.functional import pad

        widths = key_states.shape[-1], value_states.shape[-1]
        wide = [pad(each, (0, width - each.shape[-1])) for each in (key_states, value_states)]
        keys, values = update(*wide, layer_idx, kwargs)
        return keys[..., : widths[0]], values[..., : widths[1]]

    cache.update = padded


def _latent_width(config: Any) -> int:
    """The larger width of keys and values of a model with latent attention; 0 for other models."""
    parts = [getattr(config, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not all(parts):
        return 0
    without_positions, rotary, value = (int(part) for part in parts if part is not None)
    return max(without_positions + rotary, value)
