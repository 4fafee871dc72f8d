"""The attention that takes the place of TRL's kernel: each sample of a packed tree sees what it would see alone."""

from __future__ import annotations

import pytest
import torch

from tokengrove.trl.without_gpu import tree_attention

HEADS, KV_HEADS, WIDTH = 4, 2, 8
TRUNK, LEFT, RIGHT = [0, 1, 2], [3, 4], [5, 6, 7]
"""The packed places of three segments: two samples share the trunk."""


@pytest.mark.parametrize("window", [None, 2, 3, 100])
def test_a_sample_of_a_tree_is_computed_as_it_would_be_alone(window: int | None) -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, 8, WIDTH, generator=random)
    key, value = (torch.randn(1, KV_HEADS, 8, WIDTH, generator=random) for _ in range(2))
    paths = [TRUNK, TRUNK + LEFT, TRUNK + RIGHT]
    found, weights = tree_attention(
        None,
        query,
        key,
        value,
        None,
        tree_kv_index=torch.tensor([place for path in paths for place in path]),
        tree_cu_seqlens_q=torch.tensor([0, 3, 5, 8]),
        tree_cu_seqlens_k=torch.tensor([0, 3, 8, 14]),
        tree_max_seqlen_q=3,
        tree_max_seqlen_k=6,
        scaling=0.3,
        sliding_window=window,
    )
    assert weights is None and found.shape == (1, 8, HEADS, WIDTH)
    for path in paths[1:]:
        alone = attention(query[0, :, path], key[0, :, path], value[0, :, path], window)
        torch.testing.assert_close(found[0, path], alone)


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """Causal attention of one sequence, written out place by place: [L, H, D]."""
    shared = HEADS // KV_HEADS
    rows = []
    for at in range(query.shape[1]):
        first = 0 if window is None else max(0, at - window + 1)
        heads = []
        for head in range(HEADS):
            keys, values = (states[head // shared, first : at + 1] for states in (key, value))
            heads.append(((keys @ query[head, at]) * 0.3).softmax(0) @ values)
        rows.append(torch.stack(heads))
    return torch.stack(rows)
