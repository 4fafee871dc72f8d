"""The expert layers of a model, by the configs of several families."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.expert_layers import ExpertLayers, expert_layers

QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 128, "num_experts_per_tok": 8}
DEEPSEEK = {"model_type": "deepseek_v3", "num_hidden_layers": 4, "n_routed_experts": 256, "num_experts_per_tok": 8}


def layers_of(folder: Path, config: Any) -> ExpertLayers | None:
    (folder / "config.json").write_text(json.dumps(config))
    return expert_layers(folder)


@pytest.mark.parametrize(
    ("config", "routed"),
    [
        (QWEN, (0, 1, 2, 3)),
        ({**QWEN, "mlp_only_layers": [1]}, (0, 2, 3)),
        ({**QWEN, "decoder_sparse_step": 2}, (1, 3)),
        (DEEPSEEK, (0, 1, 2, 3)),
        ({**DEEPSEEK, "first_k_dense_replace": 1}, (1, 2, 3)),
        ({**DEEPSEEK, "first_k_dense_replace": 1, "moe_layer_freq": 2}, (2,)),
        ({**DEEPSEEK, "moe_layer_freq": [0, 1, 1, 0]}, (1, 2)),
        ({**DEEPSEEK, "mlp_layer_types": ["dense", "dense", "sparse", "sparse"]}, (2, 3)),
        ({**QWEN, "moe_layers": [3]}, (3,)),
    ],
)
def test_the_layers_with_experts_are_those_that_the_config_names(
    tmp_path: Path, config: dict[str, Any], routed: tuple[int, ...]
) -> None:
    found = layers_of(tmp_path, config)
    assert found is not None and not found.dense
    assert (found.layers, found.routed, found.per_token) == (4, routed, 8)


def test_the_text_part_of_a_vision_model_tells(tmp_path: Path) -> None:
    found = layers_of(tmp_path, {"model_type": "qwen3_vl_moe", "vision_config": {}, "text_config": QWEN})
    assert found == ExpertLayers(4, (0, 1, 2, 3), 8, 128)


def test_a_config_without_experts_is_that_of_a_dense_model(tmp_path: Path) -> None:
    found = layers_of(tmp_path, {"model_type": "qwen3", "num_hidden_layers": 4})
    assert found is not None and found.dense


@pytest.mark.parametrize(
    "config",
    [{}, [], {"num_hidden_layers": 4}, {"model_type": "new", "num_hidden_layers": 4, "moe": {"count": 8}}],
)
def test_a_config_that_does_not_tell_is_no_dense_model(tmp_path: Path, config: Any) -> None:
    assert layers_of(tmp_path, config) is None


def test_a_missing_config_does_not_tell(tmp_path: Path) -> None:
    assert expert_layers(tmp_path) is None and expert_layers(None) is None
