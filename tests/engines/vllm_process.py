"""Real vLLM servers on the CPU, run by the Python of their own environment (`TOKENGROVE_TEST_VLLM_PYTHON`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from proxy.engine.tiny.model import build_tiny_model, write_json
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model, save_tiny_weights
from tests.engines.engine_process import EngineProcess

VARIABLE = "TOKENGROVE_TEST_VLLM_PYTHON"
_ENVIRONMENT = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
    **{"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"},
}
_ARGUMENTS = (
    *("--host", "127.0.0.1", "--max-model-len", "4096", "--dtype", "float32", "--enforce-eager"),
    *("--max-num-seqs", "32", "--max-logprobs", "20"),
)
FULL = ("--enable-scale-out", "--enable-prompt-tokens-details")
SHIM = Path(__file__).with_name("shim")
"""Lets torchvision be imported beside a torch for CPUs."""

_HEAD = 32
"""The smallest head dimension of vLLM's attention on a CPU."""


class VllmProcess(EngineProcess):
    """A vLLM server process. `flags`, `environment`: more arguments and variables. `dev_mode`: with the endpoints for
    control."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        *flags: str,
        dev_mode: bool = True,
        port: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [os.environ[VARIABLE], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        variables = {**os.environ, **_ENVIRONMENT} | ({"VLLM_SERVER_DEV_MODE": "1"} if dev_mode else {})
        variables |= {"PYTHONPATH": str(SHIM), **(environment or {})}
        super().__init__([*command, *_ARGUMENTS, *flags], variables, log, "/health", port)


def build_wide_model(folder: Path, seed: int) -> None:
    """Build the tiny model with heads that vLLM's CPU kernels have, and with logits that differ."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    build_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {"head_dim": _HEAD, "initializer_range": 0.2}
    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**config)).save_pretrained(folder)
    write_json(folder / "config.json", config)


def build_wide_moe_model(folder: Path, seed: int) -> None:
    """Build a tiny Qwen3-MoE with such heads: 2 layers of 8 experts, 2 of them a token."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    build_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text()) | {
        **{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": _HEAD},
        **{"initializer_range": 0.2, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True},
    }
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**config)).save_pretrained(folder)
    write_json(folder / "config.json", config)


def build_wide_vision_model(folder: Path, kind: VisionKind, seed: int) -> None:
    """Build the tiny vision model with fewer heads, which vLLM's CPU kernels have."""
    from transformers import AutoConfig

    build_tiny_vision_model(folder, kind)
    config = AutoConfig.from_pretrained(folder)
    text = config.text_config
    text.num_attention_heads, text.num_key_value_heads, text.head_dim = text.hidden_size // _HEAD, 1, _HEAD
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [4, 6, 6]}
    save_tiny_weights(folder, config, seed)
