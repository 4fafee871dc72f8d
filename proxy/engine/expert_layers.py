"""The expert layers of a model, read from its `config.json`: which layers route tokens, and to how many experts each.

Only what a config says is known: a config without any word of experts is that of a dense model, and one that cannot be
read says nothing.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k")


@dataclass(frozen=True, slots=True)
class ExpertLayers:
    """`layers`: the number of all layers. `routed`: those with experts, ascending; () for a dense model. `per_token`:
    the number of experts that each of them chooses for a token. `experts`: the number to choose from; 0 if unknown.
    """

    layers: int
    routed: tuple[int, ...]
    per_token: int
    experts: int = 0

    @property
    def dense(self) -> bool:
        return not self.routed


def expert_layers(folder: Path | None) -> ExpertLayers | None:
    """The expert layers of the model in `folder`; None if its config does not tell."""
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "model_type" not in config:
        return None
    inner = config.get("text_config")
    return _layers_in({**config, **inner} if isinstance(inner, dict) else config)


def _layers_in(config: Mapping[str, Any]) -> ExpertLayers | None:
    layers = _first(config, ("num_hidden_layers",))
    if not _names_experts(config):
        return ExpertLayers(layers, (), 0)
    per_token, experts = _first(config, _PER_TOKEN), _first(config, _EXPERTS)
    if not per_token:
        return None
    routed = tuple(layer for layer in range(layers) if _routes(config, layer))
    return ExpertLayers(layers, routed, per_token, experts) if routed else None


def _names_experts(config: Mapping[str, Any]) -> bool:
    """Whether a config, or a part of it, has a field about experts."""
    for name, value in config.items():
        if value and ("expert" in name or "moe" in name):
            return True
        if isinstance(value, Mapping) and _names_experts(value):
            return True
    return False


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int:
    return next((config[name] for name in names if type(config.get(name)) is int), 0)


def _routes(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has experts, by the fields of DeepSeek, Qwen, Llama and their relatives."""
    kinds, listed, every = config.get("mlp_layer_types"), config.get("moe_layers"), config.get("moe_layer_freq") or 1
    if isinstance(kinds, list) and len(kinds) > layer:
        return bool(kinds[layer] == "sparse")
    if isinstance(listed, list):
        return layer in listed
    if isinstance(every, list):
        return bool(layer < len(every) and every[layer])
    if layer < (config.get("first_k_dense_replace") or 0) or layer in (config.get("mlp_only_layers") or ()):
        return False
    steps = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step") or 1
    return layer % every == 0 and (layer + 1) % steps == 0


def repeated(rows: NDArray[Any]) -> NDArray[np.bool_]:
    """Whether a layer has an expert twice, bool [rows, layers], for `rows` [rows, layers, k].

    No router chooses an expert twice: such ids are memory that nothing was written to. Many comparisons of columns are
    faster than a sort.
    """
    columns = np.ascontiguousarray(rows.reshape(-1, rows.shape[2]).T)
    found = np.zeros(columns.shape[1], bool)
    for one, other in itertools.combinations(columns, 2):
        found |= one == other
    return found.reshape(rows.shape[:2])
