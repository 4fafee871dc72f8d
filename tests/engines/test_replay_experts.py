"""The example's forward pass with given experts, and the hooks of the engine that record them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.mixtures import build_mixture

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from torch import nn  # noqa: E402

from proxy.engine.transformers.experts import ExpertHooks, expert_modules, unrecognised_experts  # noqa: E402

IDS = torch.arange(40, 70).reshape(2, 15)


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return importlib.import_module("replay_experts")


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3", "deepseek_v2", "glm4_moe", "mixtral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = build_mixture(tmp_path_factory.mktemp(request.param), request.param)
    return AutoModelForCausalLM.from_pretrained(folder, dtype="float32", experts_implementation="eager").eval()


@contextmanager
def ran(model: Any) -> Iterator[list[tuple[Any, Any]]]:
    """Yields a list that fills with the experts and weights of each layer of a pass."""
    calls: list[tuple[Any, Any]] = []
    hooks = [
        each.register_forward_pre_hook(lambda _, args: calls.append((args[1], args[2])))
        for each in expert_modules(model)
    ]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()


def run(model: Any) -> tuple[Any, list[Any], list[Any]]:
    """The logits of a pass, and the experts and weights of each layer."""
    with ran(model) as calls, torch.no_grad():
        logits = model(IDS, use_cache=False).logits
    return logits, [ids for ids, _ in calls], [weights for _, weights in calls]


def other_rows(model: Any) -> Any:
    """Rows that the router does not choose."""
    _, chosen, _ = run(model)
    return torch.stack([(ids.sort(-1).values + 1) % 8 for ids in chosen], dim=1)


def test_replaying_the_routers_choice_changes_nothing(replay, model) -> None:
    logits, chosen, weights = run(model)
    with replay.replayed_experts(model, torch.stack(chosen, dim=1)):
        again, ids, replayed = run(model)
    assert all(torch.equal(*pair) for pair in zip(ids, chosen, strict=True))
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(replayed, weights, strict=True))
    assert torch.allclose(again, logits, atol=1e-5)
    assert torch.equal(run(model)[0], logits)  # the hooks are gone


def test_given_experts_run_with_weights_of_the_routers_own_logits(replay, model) -> None:
    rows = other_rows(model)
    found: list[Any] = []
    hooks = [each.register_forward_hook(lambda _, __, out: found.append(out[0])) for each in replay.routers_of(model)]
    with replay.replayed_experts(model, rows):
        _, ids, weights = run(model)
    for hook in hooks:
        hook.remove()
    sigmoid = model.config.model_type in ("deepseek_v3", "glm4_moe")
    for layer, (chosen, weight, logits) in enumerate(zip(ids, weights, found, strict=True)):
        assert torch.equal(chosen, rows[:, layer])
        scores = (logits.sigmoid() if sigmoid else logits.softmax(-1)).gather(-1, chosen)
        if model.config.model_type != "deepseek_v2":
            scores = scores / scores.sum(-1, keepdim=True)
        assert torch.allclose(weight, scores * getattr(model.config, "routed_scaling_factor", 1.0), atol=1e-6)


def test_gradients_reach_the_router_through_the_weights_of_given_experts(replay, model) -> None:
    with replay.replayed_experts(model, other_rows(model)):
        model(IDS, use_cache=False).logits.logsumexp(-1).sum().backward()
    assert all(router.weight.grad.abs().max() > 0 for router in replay.routers_of(model))
    model.zero_grad()


def test_a_token_without_rows_keeps_the_routers_choice(replay, model) -> None:
    logits, _, _ = run(model)
    rows = other_rows(model)
    rows[:] = 255
    with replay.replayed_experts(model, rows, missing=255):
        assert torch.allclose(run(model)[0], logits, atol=1e-5)


def test_rows_of_another_shape_or_an_unknown_router_are_refused(replay, model) -> None:
    rows = other_rows(model)
    with pytest.raises(ValueError, match=r"rows must be \[tokens, "), replay.replayed_experts(model, rows[:, :1, 0]):
        pass
    few = replay.replayed_experts(model, rows[:29])
    with pytest.raises(ValueError, match="30 tokens, but there are rows for 29"), few:
        run(model)
    hook = replay.routers_of(model)[0].register_forward_hook(lambda _, __, out: (out[0], out[1] * 3.0, out[2]))
    with pytest.raises(ValueError, match="in an unknown way"), replay.replayed_experts(model, rows):
        run(model)
    hook.remove()


class Experts(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.num_experts = number

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        return hidden_states


class OddMoE(nn.Module):
    def forward(self, hidden_states: Any) -> Any:
        return hidden_states


@pytest.mark.parametrize(("number", "dtype"), [(128, "uint8"), (255, "uint8"), (256, "uint16")])
def test_ids_of_experts_leave_the_largest_value_of_their_dtype_free(number: int, dtype: str) -> None:
    layers = nn.Sequential(Experts(number), Experts(8))
    hooks = ExpertHooks(expert_modules(layers))
    layers[0](None, torch.tensor([[number - 1, 2], [0, 1]]), None)
    layers[1](None, top_k_index=torch.tensor([[7], [3]]), top_k_weights=None)
    rows = hooks.take(2)
    assert rows is not None and rows.dtype == dtype
    assert rows[:, 0].tolist() == [[number - 1, 2], [0, 1]]
    assert rows[:, 1, 0].tolist() == [7, 3] and (rows[:, 1, 1] == np.iinfo(dtype).max).all()


def test_a_pass_that_a_layer_did_not_see_whole_has_no_rows() -> None:
    layers = nn.Sequential(Experts(8), Experts(8))
    hooks = ExpertHooks(expert_modules(layers))
    layers[0](None, torch.tensor([[1, 2]]), None)
    assert hooks.take(1) is None
    for layer in layers:
        layer(None, torch.tensor([[1, 2]]), None)
    assert hooks.take(2) is None
    for layer in layers:
        layer(None, torch.tensor([[1, 2]]), None)
    assert hooks.take(1) is not None
    assert hooks.take(1) is None


def test_a_router_of_an_unknown_kind_is_named_and_a_dense_model_has_none() -> None:
    assert expert_modules(nn.Sequential(OddMoE())) == []
    assert "OddMoE do not pass on which experts" in unrecognised_experts(nn.Sequential(OddMoE(), nn.Linear(2, 2)))
    assert unrecognised_experts(nn.Sequential(nn.Linear(2, 2))) == ""


def without_memory(kind: str, **more: Any) -> Any:
    """A model of a kind with two layers, whose weights have no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, num_hidden_layers=2, **more)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize(
    "kind", ["qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "olmoe"]
)
def test_layers_of_the_usual_kinds_with_experts_are_recognised(kind: str) -> None:
    first = {"first_k_dense_replace": 0} if kind in ("deepseek_v2", "deepseek_v3", "glm4_moe") else {}
    model = without_memory(kind, **first)
    assert len(expert_modules(model)) == 2 and ExpertHooks(expert_modules(model)).dtype.itemsize <= 2


@pytest.mark.parametrize(("kind", "named"), [("llama4_text", "Llama4"), ("jetmoe", "JetMoe"), ("qwen3", "")])
def test_other_kinds_are_named_unless_they_are_dense(kind: str, named: str) -> None:
    model = without_memory(kind)
    assert expert_modules(model) == [] and named in unrecognised_experts(model)
    assert bool(unrecognised_experts(model)) == bool(named)


def test_only_the_text_model_is_recorded() -> None:
    text = nn.Sequential(Experts(8))
    model = SimpleNamespace(get_decoder=lambda: text, vision=Experts(4))
    assert expert_modules(model) == [text[0]]
