"""Model folders of real sizes with random weights: the architecture and vocabulary size of Qwen3.

Every id of the vocabulary decodes to text of about four letters, so random weights sample readable tokens. Weights are
written only for engines that read them; SGLang makes its own (`load_format=dummy`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from proxy.engine.tiny.model import build_tiny_model
from proxy.engine.transformers.loading import quieten

CONTEXT_LENGTH = 32_768


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a Qwen3 model, named as in its config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = True

    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Return the size in bytes of the keys and values of `tokens` tokens."""
        return tokens * 2 * itemsize * self.num_hidden_layers * self.num_key_value_heads * self.head_dim


SIZES = {
    "tiny": Shape(64, 2, 4, 2, 16, 128, 8192),
    "0.6b": Shape(1024, 28, 16, 8, 128, 3072, 151_936),
    "1.7b": Shape(2048, 28, 16, 8, 128, 6144, 151_936),
}


def write_model(folder: Path, shape: Shape, dtype: str, *, weights: bool, seed: int = 0, spread: float = 0.02) -> None:
    """Write a Hugging Face folder of this shape. `weights`: with random weights of standard deviation `spread`."""
    build_tiny_model(folder)
    (folder / "model.safetensors").unlink()
    ids = _grow_tokenizer(folder / "tokenizer.json", shape.vocab_size)
    end, pad = ids["<|im_end|>"], ids["<|endoftext|>"]
    tokens = {"max_position_embeddings": CONTEXT_LENGTH, "bos_token_id": pad, "eos_token_id": end}
    _change(folder / "config.json", {**shape.fields(), **tokens, "dtype": dtype, "initializer_range": spread})
    _change(folder / "generation_config.json", {"bos_token_id": pad, "eos_token_id": [end, pad], "pad_token_id": pad})
    if weights:
        _write_weights(folder, seed)


def _grow_tokenizer(path: Path, size: int) -> dict[str, int]:
    """Extend the tokenizer to `size` tokens: bytes, pairs of letters, words of four; return ids of added tokens."""
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    symbols = [token for token, _ in sorted(model["vocab"].items(), key=lambda item: item[1]) if len(token) == 1]
    pairs = [first + last for first, last in product(ascii_lowercase, repeat=2)]
    count = size - len(symbols) - len(pairs) - len(added)
    stride = max(len(pairs) ** 2 // count, 1)
    words = list(islice(product(pairs, repeat=2), 0, count * stride, stride))
    merges = [[pair[0], pair[1]] for pair in pairs] + [list(word) for word in words]
    tokens = symbols + pairs + ["".join(word) for word in words]
    model["vocab"], model["merges"] = {token: index for index, token in enumerate(tokens)}, merges
    for index, token in enumerate(added):
        token["id"] = len(tokens) + index
    path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    return {token["content"]: token["id"] for token in added}


def _write_weights(folder: Path, seed: int) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    quieten()
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)


def _change(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **values}, indent=2), encoding="utf-8")
