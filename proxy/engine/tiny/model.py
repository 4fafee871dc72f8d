"""The built-in model, used without `--model`: random weights from a seed, identical to the byte on every machine.

`build_tiny_model` writes an ordinary Hugging Face folder of the Qwen3 architecture. The text that the model samples is
noise, but its tokens, chat template, logprobs and speed are realistic enough to test everything else.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from proxy.engine.tiny.template import CHAT_TEMPLATE, SPECIAL_TOKENS, TRAINING_TEXT
from proxy.engine.tiny.tokenizer import VOCAB_SIZE, tokenizer_config, train_tokenizer
from tokengrove.errors import ConfigurationError


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write a value as JSON. Equal values give equal bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


CONTEXT_LENGTH = 131072
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 64, 2, 4, 2, 16, 128

FORMAT = 1
"""Increment this when the recipe of the weights changes. It is part of the folder name, so stale builds are unused."""


def build_tiny_model(folder: Path, seed: int = 0) -> None:
    """Write config, generation config, tokenizer and weights into `folder`, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    write_json(folder / "config.json", _model_config(ids))
    write_json(folder / "generation_config.json", _generation_config(ids))
    write_json(folder / "tokenizer_config.json", tokenizer_config(CHAT_TEMPLATE, CONTEXT_LENGTH))
    _write_weights(folder / "model.safetensors", seed)


def builtin_model_folder(cache: Path | None = None) -> Path:
    """Return the folder of the built-in model below `cache` (default: the user's cache folder); build it on first use.

    Safe with concurrent processes: each builds in a temporary folder and renames it. Raises ConfigurationError if the
    folder cannot be written.
    """
    folder = (cache or _user_cache()) / f"tiny-qwen3-{_fingerprint()}"
    if (folder / "config.json").is_file():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        build_tiny_model(aside)
        _move_into_place(aside, folder)
    except OSError as error:
        raise ConfigurationError(f"the built-in model cannot be written below {folder.parent}: {error}") from error
    return folder


def _move_into_place(aside: Path, folder: Path) -> None:
    try:
        aside.rename(folder)
    except OSError:
        shutil.rmtree(aside, ignore_errors=True)
        if not (folder / "config.json").is_file():  # no concurrent process built it: a real failure
            raise


def _user_cache() -> Path:
    try:  # a service account may have no home folder, or no home at all
        home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(home) / "tokengrove"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        folder = Path(tempfile.gettempdir()) / f"tokengrove-{os.getuid() if hasattr(os, 'getuid') else 0}"
    return folder


def _fingerprint() -> str:
    recipe = repr((FORMAT, VOCAB_SIZE, CONTEXT_LENGTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD))
    return hashlib.sha256((recipe + CHAT_TEMPLATE + TRAINING_TEXT).encode()).hexdigest()[:12]


def _model_config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "dtype": "float32",
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": FEED_FORWARD,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": VOCAB_SIZE,
    }


def _generation_config(ids: dict[str, int]) -> dict[str, Any]:
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    return {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": stops, "pad_token_id": ids["<|endoftext|>"]}


def _weight_shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, width in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = (width * HEAD_DIM, HIDDEN)
        shapes[f"{prefix}self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            shapes[f"{prefix}{name}.weight"] = (HEAD_DIM,)
        for name in ("mlp.gate_proj", "mlp.up_proj"):
            shapes[f"{prefix}{name}.weight"] = (FEED_FORWARD, HIDDEN)
        shapes[f"{prefix}mlp.down_proj.weight"] = (HIDDEN, FEED_FORWARD)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = (HIDDEN,)
    return shapes | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB_SIZE, HIDDEN)}


def _write_weights(path: Path, seed: int) -> None:
    """Write the weights. Norms are ones; other weights are uniform in ±0.25.

    Logits then differ by a few nats, and ties are unlikely.
    """
    import numpy as np
    from safetensors.numpy import save_file

    random = np.random.Generator(np.random.PCG64(seed))
    weights = {}
    for name, shape in _weight_shapes().items():
        if len(shape) == 1:
            weights[name] = np.ones(shape, dtype=np.float32)
        else:
            weights[name] = (random.random(shape, dtype=np.float32) - 0.5) * np.float32(0.5)
    save_file(weights, path, metadata={"format": "pt"})
