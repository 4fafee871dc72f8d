"""Loss and gradients of a model on packed sequences of layout forest equal those on the samples of layout concat.

The model runs in float32, once on each sample and once on each sequence with the mask of its tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.proxy.trajectory.test_forest import Session, as_client, laid_out, options_of, packed, sessions
from tokengrove.client.forest import PackedSequence, attention_mask, block_mask, model_inputs, token_logprobs
from tokengrove.client.values import Sample, sample_of
from tokengrove.options.export import Forest, Merge

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.engines
CLIP = 0.2


def model_of(attention: str) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        **{"vocab_size": 16, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5},
        attn_implementation=attention,
    )
    return transformers.Qwen3ForCausalLM(config).train()


def clipped(now: Any, before: Any, advantages: Any, weights: Any) -> Any:
    """The clipped objective of each token (Schulman et al. 2017, "Proximal Policy Optimization", equation 7)."""
    ratio = (now - torch.tensor(before)).exp()
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(gain * weights).sum()


def loss_of_sample(model: Any, sample: Sample) -> Any:
    ids = torch.tensor(sample.input_ids, dtype=torch.long)
    logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
    trained = torch.tensor(np.flatnonzero(sample.loss_mask))
    trained = trained[trained > 0]
    now = logprobs[trained - 1, ids[trained]]
    return clipped(now, sample.logprobs[trained], sample.advantage, sample.weight)


def loss_of_sequence(model: Any, sequence: PackedSequence) -> Any:
    dtype = torch.float32 if model.config._attn_implementation == "eager" else None
    now = token_logprobs(model(**model_inputs(sequence, mask_dtype=dtype)).logits[0], sequence)
    trained = np.flatnonzero((sequence.loss_mask > 0) & (sequence.parent >= 0))
    weights = torch.tensor(sequence.row_weights[sequence.row_ids[trained]])
    advantages = torch.tensor(sequence.extra["advantages"][trained])
    return clipped(now[torch.tensor(trained)], sequence.logprobs[trained], advantages, weights)


def gradients(model: Any, losses: Sequence[Any]) -> tuple[float, Any]:
    """The loss and the gradient of all parameters, one after the other."""
    model.zero_grad()
    loss = torch.stack(losses).sum()
    loss.backward()
    parts = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    return loss.item(), torch.cat([each.reshape(-1) for each in parts])


@given(sessions(), st.sampled_from([None, 24, 40]), st.sampled_from(Merge))
@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradients_are_those_of_the_samples(
    attention: str, found: list[Session], most: int | None, merge: Merge
) -> None:
    rows = [row for _, own in laid_out(found, options_of(None)) for row in own]
    samples = [sample_of(row.to_json()) for row in rows if len(row.arrays.input_ids)]
    sequences = [as_client(each) for each in packed(found, Forest(max_tokens=most, merge=merge))[0]]
    if not samples or sum(len(each.rows) for each in sequences) < len(rows):
        return
    model = model_of(attention)
    loss, expected = gradients(model, [loss_of_sample(model, each) for each in samples])
    made, found_gradient = gradients(model, [loss_of_sequence(model, each) for each in sequences])
    scale = max(1.0, expected.abs().max().item())
    assert made == pytest.approx(loss, abs=1e-5 * max(1.0, abs(loss)))
    assert (found_gradient - expected).abs().max().item() < 1e-5 * scale


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@given(sessions())
@settings(max_examples=10, deadline=None)
def test_flex_attention_sees_what_the_explicit_mask_shows(found: list[Session]) -> None:
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    for each in packed(found, Forest(merge=Merge.ALL))[0]:
        sequence = as_client(each)
        torch.manual_seed(1)
        query, key, value = torch.randn(3, 1, 2, len(sequence), 16)
        masked = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=torch.tensor(attention_mask(sequence))
        )
        assert torch.allclose(
            flex.flex_attention(query, key, value, block_mask=block_mask(sequence)), masked, atol=1e-5
        )
