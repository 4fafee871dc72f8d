"""Folders of models that see, of several families: real processors of transformers with tiny tokenizers, no weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

_LISTS = """
{%- for message in messages %}
    {%- if message.content is string %}{{ message.nothing }}
    {%- else %}
        {{- message.role | capitalize }}{{ ':' if message.content[0].type == 'image' else ': ' }}
        {%- for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}
"""
_IMAGES_FIRST = """
{%- for message in messages %}
    {{- message.role.upper() + ': ' }}
    {%- for part in message.content | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}
    {%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part['text'] + ' ' }}{% endfor %}
    {{- '<|im_end|>' if message.role == 'assistant' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}
"""
_TRIMMED = """
{%- for message in messages %}
    {{- '<|im_start|>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.content is string %}{{ message.content | trim }}
    {%- elif message.role == 'tool' %}{{ raise_exception('a tool result is a text') }}
    {%- else %}
        {%- for part in message.content %}{{ PLACEHOLDER if part.type == 'image' else part.text | trim }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>model\\n' }}{% endif %}
"""


def _tokenizer(*special: str, **named: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    from proxy.engine.tiny.tokenizer import train_tokenizer

    return PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer((*special, *named.values())),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=named,
    )


def _llava() -> tuple[Any, str]:
    from transformers import CLIPImageProcessor, LlavaProcessor

    images = CLIPImageProcessor(size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56})
    tokenizer = _tokenizer("<image>")
    named = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, **named), _IMAGES_FIRST


def _llava_next() -> tuple[Any, str]:
    from transformers import LlavaNextImageProcessor, LlavaNextProcessor

    grids, crop = [[56, 112], [112, 56], [112, 112]], {"height": 56, "width": 56}
    images = LlavaNextImageProcessor(size={"shortest_edge": 56}, crop_size=crop, image_grid_pinpoints=grids)
    named = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaNextProcessor(images, _tokenizer("<image>"), **named), _IMAGES_FIRST


def _gemma3(**options: Any) -> tuple[Any, str]:
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    images = Gemma3ImageProcessor(size={"height": 56, "width": 56}, **options)
    template = _TRIMMED.replace("PLACEHOLDER", "'<start_of_image>'")
    return Gemma3Processor(images, _tokenizer(**named), image_seq_length=16), template


def _gemma3_pan() -> tuple[Any, str]:
    return _gemma3(do_pan_and_scan=True, pan_and_scan_min_crop_size=64, pan_and_scan_max_num_crops=3)


def _idefics3() -> tuple[Any, str]:
    from transformers import Idefics3ImageProcessor, Idefics3Processor

    tokenizer = _tokenizer("<fake_token_around_image>", "<image>", "<global-img>", "<end_of_utterance>")
    images = Idefics3ImageProcessor(size={"longest_edge": 128}, max_image_size={"longest_edge": 64})
    return Idefics3Processor(images, tokenizer, image_seq_len=4), _LISTS


def _internvl() -> tuple[Any, str]:
    from transformers import GotOcr2ImageProcessor, InternVLProcessor

    images = GotOcr2ImageProcessor(size={"height": 56, "width": 56}, crop_to_patches=True, max_patches=4)
    named = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>"}
    lenient = type("InternVLProcessor", (InternVLProcessor,), {"check_argument_for_proper_class": _any_class})
    processor = lenient(images, _tokenizer(**named, video_token="<video>"), None, image_seq_length=4)
    return processor, _TRIMMED.replace("PLACEHOLDER", "'<IMG_CONTEXT>\\n'")


def _any_class(self: object, name: str, value: object) -> type:
    return type(value)


NUMBERED = _TRIMMED.replace("PLACEHOLDER", "'<start_of_image>'").replace(
    "{{ '<start_of_image>' if part.type == 'image' else part.text | trim }}",
    "{% if part.type == 'image' %}{% set count.value = count.value + 1 %}"
    "{% if add_vision_id %}{{ 'Picture ' ~ count.value ~ ': ' }}{% endif %}<start_of_image>"
    "{% else %}{{ part.text | trim }}{% endif %}",
)
NUMBERED = "{%- set count = namespace(value=0) %}" + NUMBERED
"""A template that numbers the images of a conversation if asked to, as Qwen's do."""

_MAKERS: dict[str, Callable[[], tuple[Any, str]]] = {
    "llava": _llava,
    "llava_next": _llava_next,
    "gemma3": _gemma3,
    "gemma3_pan": _gemma3_pan,
    "idefics3": _idefics3,
    "internvl": _internvl,
}
FAMILIES = tuple(_MAKERS)


@cache
def made(name: str) -> tuple[Any, str]:
    """Return a processor of transformers, and a chat template in the style of its family."""
    return _MAKERS[name]()


def write_family(folder: Path, name: str, template: str = "") -> None:
    """Write what a server needs to know of the model. `template`: another one than that of its family."""
    processor, own = made(name)
    template = template or own
    processor.tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps({"model_type": name, "vision_config": {}}), encoding="utf-8")
    (folder / "processor_config.json").write_text("{}", encoding="utf-8")
