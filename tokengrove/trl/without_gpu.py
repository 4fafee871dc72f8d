"""Training on a CPU with TRL's asynchronous trainer, which TRL 1.16 does not support: for trials and tests.

Two parts of the trainer need a GPU: the attention of its packed rows, a FlashAttention kernel, and a query of the GPU's
speed for a metric. Plain torch replaces the kernel; the metric is left out.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from tokengrove.client.libraries import library

_PACKAGE = "trl.experimental.async_grpo"


def train_without_gpu() -> None:
    """Call it before `AsyncGRPOTrainer` is created, with `AsyncGRPOConfig(use_cpu=True, bf16=False)`.

    It applies to this process. It has no effect if torch finds a GPU. Raises InvalidRequest if trl is not installed.
    """
    if library("torch").cuda.is_available():
        return
    trainer: Any = library(f"{_PACKAGE}.async_grpo_trainer")
    trainer.get_peak_flops_per_device = lambda accelerator, dtype: None
    trainer.register_tree_attention = _register


def _register() -> None:
    """TRL's registration of attention, called for each trainer: its kernel by name, then ours by the same name."""
    packing: Any = library(f"{_PACKAGE}.packing")
    packing.register_tree_attention()
    library("transformers").AttentionInterface.register(packing.TREE_ATTENTION, tree_attention)


def tree_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    *,
    tree_kv_index: Any,
    tree_cu_seqlens_q: Any,
    tree_cu_seqlens_k: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """The attention of `trl.experimental.async_grpo.packing.tree_attention`, segment by segment.

    `query` [1, H, N, D], `key` and `value` [1, KV heads, N, D] of N packed tokens. Segment s, the queries from
    `tree_cu_seqlens_q[s]` to the next, ends the path of keys `tree_kv_index[tree_cu_seqlens_k[s]:]` up to the next:
    each query attends to the keys of its path up to its own. Returns [1, N, H, D].
    """
    torch = library("torch")
    groups = query.shape[1] // key.shape[1]
    keys, values = (states[0].repeat_interleave(groups, 0)[:, tree_kv_index] for states in (key, value))
    outputs = []
    ends = zip(pairwise(tree_cu_seqlens_q.tolist()), pairwise(tree_cu_seqlens_k.tolist()), strict=True)
    for (start, end), (first, last) in ends:
        count, width = end - start, last - first
        seen = torch.ones(count, width, dtype=torch.bool, device=query.device).tril(width - count)
        if sliding_window:
            seen = seen.triu(width - count - sliding_window + 1)
        outputs.append(
            torch.nn.functional.scaled_dot_product_attention(
                query[0, :, start:end], keys[:, first:last], values[:, first:last], attn_mask=seen, scale=scaling
            )
        )
    return torch.cat(outputs, 1).transpose(0, 1).unsqueeze(0), None
