"""Tiny models, with experts and without, whose random weights give routers and samplers something to choose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proxy.engine.tiny.model import build_tiny_model

_SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_GROUPED = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "n_shared_experts": 1}
_LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20}
_CHOICE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1], **_CHOICE},
    "deepseek_v3": {**_GROUPED, **_LATENT, **_CHOICE},
    "deepseek_v2": {**_GROUPED, **_LATENT, **_CHOICE, "topk_method": "group_limited_greedy"},
    "glm4_moe": {"head_dim": 16, **_GROUPED, **_CHOICE},
    "mixtral": {"head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 16},
}
"""The options of each kind (`model_type`), beside its shape."""


def build_mixture(folder: Path, kind: str, seed: int = 0) -> Path:
    """Write a model of a kind, with the tokenizer and chat template of the built-in model; return `folder`."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    build_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    built_in = json.loads((folder / "config.json").read_text())
    shared = {name: built_in[name] for name in ("vocab_size", "eos_token_id", "bos_token_id")}
    config = AutoConfig.for_model(kind, **shared, **_SHAPE, **KINDS[kind])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": built_in["eos_token_id"]}))
    return folder
