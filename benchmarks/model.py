"""The model folder of a run: a tokenizer, a chat template and a configuration, without weights.

The engine and every gateway that renders prompts read the same folder, so they disagree only if one of them
re-tokenises. The tokenizer is byte-level BPE, trained on the words of the load: equal seeds give equal folders. With
the tokenizer of a real model, only the template and the configuration are written.
"""

from __future__ import annotations

import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2.sandbox
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.texts import Words

END = "<|im_end|>"
IMAGE = "<|image_pad|>"
CALL, CALL_END = "<tool_call>", "</tool_call>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", END, "<|vision_start|>", "<|vision_end|>", IMAGE, "<|video_pad|>")
MARKERS = (CALL, CALL_END, "<tool_response>", "</tool_response>")
VOCAB = 4096
CONTEXT = 131_072
IMAGE_SIDE, IMAGE_TOKENS = 56, 4
"""Pixels of the images of the load, and the tokens that the processor of `write_vision_model` makes of each."""

_TRAINING_WORDS = 50_000
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

TEMPLATE = """
{%- macro text(content) -%}
  {%- if content is string -%}{{ content }}
  {%- else -%}
    {%- for part in content or [] -%}
      {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type in ('image', 'image_url') else part.text -}}
    {%- endfor -%}
  {%- endif -%}
{%- endmacro -%}
{%- set system = messages[0] if messages[0].role == 'system' else none -%}
{%- if tools or system -%}
  {{- '<|im_start|>system\\n' ~ (text(system.content) if system else 'You are an agent.') -}}
  {%- if tools -%}
    {{- '\\n\\nTools, as JSON schemas:\\n<tools>' -}}
    {%- for tool in tools -%}{{- '\\n' ~ (tool | tojson) -}}{%- endfor -%}
    {{- '\\n</tools>\\nCall one with <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>' -}}
  {%- endif -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' ~ text(message.content) -}}
    {%- for call in message.tool_calls or [] -%}
      {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' -}}
      {%- set given = call.function.arguments -%}
      {{- (given if given is string else given | tojson) ~ '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif message.role == 'tool' -%}
    {{- '<|im_start|>user\\n<tool_response>\\n' ~ text(message.content) ~ '\\n</tool_response><|im_end|>\\n' -}}
  {%- elif message.role != 'system' or not loop.first -%}
    {{- '<|im_start|>' ~ message.role ~ '\\n' ~ text(message.content) ~ '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""".strip()


def write_model(folder: Path, tokenizer: Path | None = None, seed: int = 0) -> None:
    """Write the model folder. `tokenizer`: a folder with a `tokenizer.json` to use instead of the trained one."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer is None:
        _train(seed).save(str(folder / "tokenizer.json"))
    else:
        shutil.copyfile(tokenizer / "tokenizer.json", folder / "tokenizer.json")
    loaded = Tokenizer.from_file(str(folder / "tokenizer.json"))
    _add_tokens(loaded)
    loaded.save(str(folder / "tokenizer.json"))
    named = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END,
        "pad_token": "<|endoftext|>",
        "model_max_length": CONTEXT,
    }
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": loaded.get_vocab_size(),
        "eos_token_id": loaded.token_to_id(END),
        "max_position_embeddings": CONTEXT,
        **{"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 1, "num_key_value_heads": 1},
    }
    for name, content in (("tokenizer_config.json", named), ("config.json", config)):
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_vision_model(folder: Path, model: Path) -> None:
    """Write a folder like `model`, of a model that sees: Qwen2.5-VL's configuration and processor."""
    shutil.copytree(model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    patches = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": IMAGE_SIDE**2, "longest_edge": 64 * IMAGE_SIDE**2}
    pixels = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "size": size, **pixels, **patches}
    processor["processor_class"] = "Qwen2_5_VLProcessor"
    video = {"video_processor_type": "Qwen2VLVideoProcessor", **patches}
    named = json.loads((folder / "tokenizer_config.json").read_text()) | {"processor_class": "Qwen2_5_VLProcessor"}
    text = json.loads((folder / "config.json").read_text())
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 8}
    vision |= {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
    config = {**text, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    config |= {"text_config": text | {"model_type": "qwen2_5_vl_text"}, "vision_config": vision}
    tokens = {
        "image": IMAGE,
        "video": "<|video_pad|>",
        "vision_start": "<|vision_start|>",
        "vision_end": "<|vision_end|>",
    }
    config |= {f"{name}_token_id": tokenizer.token_to_id(token) for name, token in tokens.items()}
    files = {"tokenizer_config": named, "config": config, "preprocessor_config": processor}
    for name, content in (files | {"video_preprocessor_config": video}).items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1), encoding="utf-8")


def _train(seed: int) -> Tokenizer:
    words = Words(seed)
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator([words.text(_TRAINING_WORDS)], trainer)
    return tokenizer


def _add_tokens(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in MARKERS])


class Model:
    """The tokenizer and the template of a model folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(autoescape=False)
        environment.filters["tojson"] = _to_json  # as transformers: no HTML escapes
        self._template = environment.from_string(TEMPLATE)
        self._segment = lru_cache(maxsize=65_536)(self._encode_segment)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int], *, special: bool = True) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=not special))

    def id_of(self, token: str) -> int:
        """Return the id of a special token."""
        found = self.tokenizer.token_to_id(token)
        assert found is not None
        return int(found)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[int]:
        """Return the prompt ids of a chat as vLLM does: the arguments of tool calls are objects in the template.

        Special tokens separate the messages, so the ids of each are cached.
        """
        text = self._template.render(
            messages=[_with_objects(message) for message in messages], tools=tools, add_generation_prompt=True
        )
        ids: list[int] = []
        first, *rest = text.split("<|im_start|>")
        ids += self._segment(first)
        for segment in rest:
            ids += self._segment("<|im_start|>" + segment)
        return ids

    def _encode_segment(self, text: str) -> tuple[int, ...]:
        return tuple(self.encode(text))


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
