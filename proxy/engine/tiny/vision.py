"""Tiny vision models with random weights from a seed, for tests and examples. They need torch and transformers.

`build_tiny_vision_model` writes an ordinary Hugging Face folder of the Qwen2.5-VL or Qwen3-VL architecture, with the
processor's files. An image takes 1 to 64 tokens: one for each 28 x 28 (Qwen3-VL: 32 x 32) pixels.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from proxy.engine.tiny.model import write_json
from proxy.engine.tiny.template import CHAT_TEMPLATE, SPECIAL_TOKENS
from proxy.engine.tiny.tokenizer import tokenizer_config, train_tokenizer

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
MOST_TOKENS = 64
"""The maximum number of tokens of an image; larger images are scaled down."""

CONTEXT_LENGTH = 32768
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _FEED_FORWARD = 64, 2, 4, 2, 128
_VISION_HIDDEN, _VISION_LAYERS, _VISION_HEADS = 32, 2, 2
# transformers would fill these in; vLLM does not normalise the pixels of a model without them.
_NORMALIZATION = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_PARTS = """
{%- macro written(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
""".strip()


class VisionKind(StrEnum):
    """The architecture of a tiny vision model, as `model_type` in its config.json."""

    QWEN2_5_VL = "qwen2_5_vl"
    QWEN3_VL = "qwen3_vl"


def vision_template() -> str:
    """Return the chat template of the built-in model, extended with images wherever a message may have text."""
    shown = CHAT_TEMPLATE.replace("messages[0].content if", "written(messages[0].content) if")
    shown = shown.replace("message.content if message.content is string else ''", "written(message.content)")
    return _PARTS + shown


def build_tiny_vision_model(folder: Path, kind: VisionKind = VisionKind.QWEN2_5_VL, seed: int = 0) -> None:
    """Write config, processor, tokenizer and weights into `folder`, which is created if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(VISION_TOKENS)
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, *VISION_TOKENS)}
    processor = "Qwen2_5_VLProcessor" if kind is VisionKind.QWEN2_5_VL else "Qwen3VLProcessor"
    template = vision_template()
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")  # processors read it only from this file
    named = tokenizer_config(template, CONTEXT_LENGTH) | {"processor_class": processor}
    write_json(folder / "tokenizer_config.json", named)
    write_json(folder / "preprocessor_config.json", _image_processor(kind) | {"processor_class": processor})
    write_json(folder / "video_preprocessor_config.json", _video_processor(kind) | {"processor_class": processor})
    save_tiny_weights(folder, _config(kind, ids, tokenizer.get_vocab_size()), seed)
    stops = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = {"bos_token_id": ids["<|endoftext|>"], "eos_token_id": stops, "pad_token_id": ids["<|endoftext|>"]}
    write_json(folder / "generation_config.json", generation)


def _patches(kind: VisionKind) -> dict[str, Any]:
    return {"patch_size": 14 if kind is VisionKind.QWEN2_5_VL else 16, "temporal_patch_size": 2, "merge_size": 2}


def _image_processor(kind: VisionKind) -> dict[str, Any]:
    patches = _patches(kind)
    token_pixels = (patches["patch_size"] * patches["merge_size"]) ** 2
    size = {"shortest_edge": token_pixels, "longest_edge": token_pixels * MOST_TOKENS}
    return {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **_NORMALIZATION, **patches}


def _video_processor(kind: VisionKind) -> dict[str, Any]:
    name = "Qwen2VLVideoProcessor" if kind is VisionKind.QWEN2_5_VL else "Qwen3VLVideoProcessor"
    return {"video_processor_type": name, **_patches(kind)}


def _config(kind: VisionKind, ids: dict[str, int], vocabulary: int) -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen3VLConfig

    text: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": _HIDDEN,
        "intermediate_size": _FEED_FORWARD,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [2, 3, 3]},
    }
    vision: dict[str, Any] = {
        "depth": _VISION_LAYERS,
        "hidden_size": _VISION_HIDDEN,
        "num_heads": _VISION_HEADS,
        "intermediate_size": 2 * _VISION_HIDDEN,
        "out_hidden_size": _HIDDEN,
        "patch_size": _patches(kind)["patch_size"],
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }
    tokens = {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "tie_word_embeddings": False,
    }
    if kind is VisionKind.QWEN2_5_VL:
        vision |= {"window_size": 56, "fullatt_block_indexes": [1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **tokens)
    text |= {"head_dim": _HIDDEN // _HEADS}
    text["rope_parameters"] |= {"mrope_interleaved": True}
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def save_tiny_weights(folder: Path, config: Any, seed: int) -> None:
    """Write random weights for `config`. Norms are ones and biases zeros; other weights are uniform in ±0.25."""
    import torch
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_config(config)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                weight.copy_((torch.rand(weight.shape, generator=random) - 0.5) * 0.5)
    model.save_pretrained(folder)
