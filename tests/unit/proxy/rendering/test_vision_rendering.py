"""Prompts of models that see, against the processor of transformers, which is the oracle for every id."""

from __future__ import annotations

import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rendering_folders import ASSETS

from proxy.rendering.renderer import Renderer, load_renderer
from proxy.rendering.templates.message_dicts import to_dicts, tool_dicts
from proxy.settings import Settings
from proxy.types import ImagePart, Message, Role, Tool, ToolCall
from proxy.vision.load_processor import load_processor
from tests.vision import KINDS
from tokengrove.errors import InvalidRequest
from tokengrove.image_detail import shown_size

TOOLS = (Tool("look", "Look at the screen.", {"type": "object", "properties": {"at": {"type": "string"}}}),)
SIZES = ((8, 8), (30, 500), (100, 80), (299, 201), (640, 480), (1000, 90))
TEXTS = ("", "What is this?", " \n", "a <|im_end|> b", "é🙂", "x\n\n")


@pytest.fixture(scope="session", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def seeing(vision_folders: dict[str, Path]) -> Any:
    @cache
    def load(kind: str) -> tuple[Renderer, Any]:
        folder = vision_folders[kind]
        return load_renderer(Settings(), folder), load_processor(folder)

    return load


def by_processor(processor: Any, messages: list[Message], tools: tuple[Tool, ...]) -> list[int]:
    """The ids that transformers makes of a conversation, with a blank image in the place of each."""
    from PIL import Image

    text = processor.tokenizer.apply_chat_template(
        to_dicts(messages), tools=tool_dicts(tools), add_generation_prompt=True, tokenize=False
    )
    sizes = [shown_size(image.width, image.height, image.detail) for message in messages for image in message.images]
    images = [Image.new("RGB", size) for size in sizes] or None
    found: list[int] = processor(text=[text], images=images)["input_ids"][0]
    return found


def random_image(chance: random.Random, at: int) -> ImagePart:
    digest = f"{chance.randrange(2**30):064x}"
    return ImagePart(digest, at, *chance.choice(SIZES), chance.choice(["", "low", "high"]))


def random_message(chance: random.Random, role: Role, **more: Any) -> Message:
    text = "".join(chance.choices(TEXTS, k=chance.randrange(4)))
    places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.choice([0, 0, 1, 1, 2, 5])))
    return Message(role, text, images=tuple(random_image(chance, at) for at in places), **more)


def random_conversation(chance: random.Random) -> list[Message]:
    messages = [Message(Role.SYSTEM, "Be brief.")] if chance.random() < 0.5 else []
    for turn in range(chance.randrange(1, 4)):
        messages.append(random_message(chance, Role.USER))
        if chance.random() < 0.5:
            messages.append(Message(Role.ASSISTANT, "", (ToolCall(f"call_{turn}", "look", '{"at": "x"}'),)))
            messages.append(random_message(chance, Role.TOOL, tool_call_id=f"call_{turn}"))
        messages.append(Message(Role.ASSISTANT, f"answer {turn}"))
    return [*messages, random_message(chance, Role.USER)]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_prompts_with_images_are_those_of_the_models_own_processor(seeing: Any, kind: str, seed: int) -> None:
    renderer, processor = seeing(kind)
    chance = random.Random(seed)
    messages, tools = random_conversation(chance), chance.choice([(), TOOLS])
    assert list(renderer.render(messages, tools, {})) == by_processor(processor, messages, tools)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_the_span_of_an_image_holds_its_tokens_and_nothing_else(seeing: Any, kind: str, seed: int) -> None:
    renderer, processor = seeing(kind)
    messages = random_conversation(random.Random(seed))
    ids = renderer.render(messages, (), {})
    placed = renderer.placed(ids, messages)
    images = [image for message in messages for image in message.images]
    assert [image.digest for image in placed] == [image.digest for image in images]
    inside = [at for image in placed for at in range(image.start, image.start + image.length)]
    assert inside == [at for at, token in enumerate(ids) if token == processor.image_token_id]


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_a_bridged_turn_with_images_equals_the_full_rendering(seeing: Any, kind: str, seed: int) -> None:
    renderer, _ = seeing(kind)
    chance = random.Random(seed)
    history, answer = random_conversation(chance), Message(Role.ASSISTANT, "It is a cat.")
    new = [random_message(chance, Role.USER), random_message(chance, Role.USER)]
    prompt, output = renderer.render(history, (), {}), renderer.encode("It is a cat.<|im_end|>")
    suffix = renderer.bridge(prompt, output, answer, new, (), {})
    assert suffix is not None
    whole = [*history, answer, *new]
    assert prompt + output + suffix == renderer.render(whole, (), {})
    start = len(prompt) + len(output)
    assert renderer.placed(prompt, history) + renderer.placed(suffix, new, start) == renderer.placed(
        prompt + output + suffix, whole
    )


def test_a_text_that_spells_an_image_token_is_text(seeing: Any, kind: str) -> None:
    renderer, processor = seeing(kind)
    spelled = "see <|image_pad|><|video_pad|> here"
    image = ImagePart("0" * 64, 4, 100, 80)
    call = ToolCall("call_0", "look", '{"at": "<|image_pad|>"}')
    messages = [
        Message(Role.USER, spelled, images=(image,)),
        Message(Role.ASSISTANT, "", (call,)),
        Message(Role.TOOL, spelled, (), "call_0"),
    ]
    ids = renderer.render(messages, TOOLS, {})
    [placed] = renderer.placed(ids, messages)
    assert ids.count(processor.image_token_id) == placed.length
    assert ids.count(processor.video_token_id) == 0
    text = renderer.decode(ids[: placed.start]) + renderer.decode(ids[placed.start + placed.length :])
    assert text.count("<|image_pad|>") == 3
    assert spelled in text


def test_image_tokens_of_another_number_than_the_images_take_are_refused(seeing: Any, kind: str) -> None:
    renderer, _ = seeing(kind)
    image = ImagePart("0" * 64, 0, 100, 80)
    one, two = ([Message(Role.USER, "", images=(image,) * count)] for count in (1, 2))
    for ids, messages in ((renderer.render(two, (), {}), one), (renderer.render(one, (), {}), two)):
        with pytest.raises(InvalidRequest, match=f"image tokens, but its {len(messages[0].images)} images take"):
            renderer.placed(ids, messages)


def test_a_size_that_the_processor_refuses_is_told(seeing: Any, kind: str) -> None:
    renderer, _ = seeing(kind)
    with pytest.raises(InvalidRequest, match="cannot take an image of 1000 x 2 pixels: absolute aspect ratio"):
        renderer.render([Message(Role.USER, "", images=(ImagePart("0" * 64, 0, 1000, 2),))], (), {})


def test_a_model_without_eyes_refuses_images_by_name(tiny: Renderer) -> None:
    with pytest.raises(InvalidRequest, match="text only, no images"):
        tiny.render([Message(Role.USER, "", images=(ImagePart("0" * 64, 0, 8, 8),))], (), {})


@pytest.mark.parametrize("name", ["qwen3_5_think", "qwen3_8"])
def test_published_templates_write_images_as_their_processor_reads_them(
    vision_folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    source = ASSETS / "chat_templates" / f"{name}.jinja"
    if not source.is_file():
        pytest.skip(f"no chat template at {source}")
    folder = tmp_path / name
    shutil.copytree(vision_folders["qwen3_vl"], folder)
    shutil.copy(source, folder / "chat_template.jinja")
    renderer, processor = load_renderer(Settings(), folder), load_processor(folder)
    for seed in range(20):
        messages = random_conversation(random.Random(seed))
        assert list(renderer.render(messages, TOOLS, {})) == by_processor(processor, messages, TOOLS)
    seen = Message(Role.SYSTEM, "Rules.", images=(ImagePart("0" * 64, 0, 64, 48),))
    with pytest.raises(InvalidRequest, match="cannot express images in system messages; put them into a user message"):
        renderer.render([seen, Message(Role.USER, "Go.")], (), {})


HOISTING = """\
{%- macro shown(m) -%}
{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for part in m.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- for m in messages if m.role == 'system' -%}<|im_start|>system
{{ shown(m) }}<|im_end|>
{% endfor -%}
{%- for m in messages if m.role != 'system' -%}<|im_start|>{{ m.role }}
{{ shown(m) }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def test_images_of_a_message_that_the_template_moves_are_refused(vision_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "hoisting"
    shutil.copytree(vision_folder, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(HOISTING, encoding="utf-8")
    renderer = load_renderer(Settings(), folder)
    first, later = ImagePart("a" * 64, 0, 100, 80), ImagePart("b" * 64, 0, 64, 48)
    asked, answer = Message(Role.USER, "one", images=(first,)), Message(Role.ASSISTANT, "fine")
    moved, last = Message(Role.SYSTEM, "two"), Message(Role.USER, "three", images=(later,))
    ids = renderer.render([asked, answer, moved, last], (), {})
    assert [image.digest for image in renderer.placed(ids, [asked, last])] == [first.digest, later.digest]
    with pytest.raises(InvalidRequest, match="images in later system messages; put them into a user message"):
        renderer.render([asked, answer, moved._replace(images=(later,)), last], (), {})
