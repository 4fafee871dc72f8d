"""Tokenizer folders for tests: the built-in vocabulary with any published chat template."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from tests.wide import few

ROOT = Path(__file__).parents[4]
KEPT_TOKENS = 12_000
ASSETS = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", ROOT.parent / "shared"))

# Published template -> the `model_type` of its model, and the tokens that end a turn.
ENDS = {
    "cohere2": ("cohere2", ["<|END_OF_TURN_TOKEN|>"]),
    "deepseekv3": ("deepseek_v3", ["<\uff5cend\u2581of\u2581sentence\uff5c>"]),
    "gemma3": ("gemma3", ["<end_of_turn>"]),
    "glm4moe": ("glm4_moe", ["<|endoftext|>", "<|user|>", "<|observation|>"]),
    "gptoss": ("gpt_oss", ["<|return|>", "<|call|>"]),
    "llama3_1": ("llama", ["<|eot_id|>", "<|eom_id|>"]),
    "nemotron_3_nano": ("nemotron_h", ["<|im_end|>"]),
    "phi3": ("phi3", ["<|end|>"]),
    "qwen2_5": ("qwen2", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3": ("qwen3", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_5_think": ("qwen3_5", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_8": ("qwen3_8", ["<|im_end|>", "<|endoftext|>"]),
    "qwen3_instruct_2507": ("qwen3", ["<|im_end|>", "<|endoftext|>"]),
}

QUICK = ("gptoss", "llama3_1", "qwen3", "qwen3_5_think")
"""Families whose templates, stops and calls work differently."""

FAMILIES = few(ENDS, QUICK[:3])
"""Every family; a quick run takes three."""

MARKERS = re.compile(
    "<[|\uff5c][^<>\\s]{1,40}[|\uff5c]>|\\[gMASK\\]|<sop>"
    "|</?(?:start_of_turn|end_of_turn|think|tool_call|tool_response|arg_key|arg_value)>"
)


def write_folder(
    folder: Path, base: Path, template: str | None, markers: list[str], ends: list[str], model_type: str
) -> Path:
    """Write a tokenizer folder: a copy of `base` with more markers, other end tokens and another template."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0], "bos_token": "<|begin_of_text|>"}
    if template is not None:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    ids = [tokenizer.token_to_id(end) for end in ends]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}), encoding="utf-8")
    return folder


def write_spelled_tokenizer(base: Path, target: Path) -> dict[str, int]:
    """Write the start of the vocabulary of `base` plus the markers of every published template; returns their ids.

    Byte-pair merges build only on earlier ones, so the first ones form a vocabulary that loads ten times faster.
    """
    from tokenizers import AddedToken, Tokenizer

    read = json.loads((base / "tokenizer.json").read_text(encoding="utf-8"))
    model = read["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items() if number < KEPT_TOKENS}
    model["merges"] = [merge for merge in model["merges"] if "".join(merge) in model["vocab"]]
    read["added_tokens"] = [{**token, "id": KEPT_TOKENS + number} for number, token in enumerate(read["added_tokens"])]

    sources = [(ASSETS / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8") for name in ENDS]
    ends = [end for _, found in ENDS.values() for end in found]
    markers = dict.fromkeys([*(m for text in sources for m in MARKERS.findall(text)), *ends, "<|begin_of_text|>"])
    tokenizer = Tokenizer.from_str(json.dumps(read))
    tokenizer.add_special_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    tokenizer.save(str(target))
    return {marker: tokenizer.token_to_id(marker) for marker in markers}


def write_spelled_folder(folder: Path, tokenizer: Path, name: str, ids: dict[str, int]) -> Path:
    """Write a folder with such a tokenizer and the published template `name`."""
    model_type, ends = ENDS[name]
    template = (ASSETS / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ends[0],
        "bos_token": "<|begin_of_text|>",
        "chat_template": template,
    }
    (folder / "tokenizer.json").symlink_to(tokenizer)
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}), encoding="utf-8")
    eos = {"eos_token_id": [ids[end] for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(eos), encoding="utf-8")
    return folder
