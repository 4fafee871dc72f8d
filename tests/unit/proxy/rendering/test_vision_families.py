"""Images in prompts of other families, each against its own processor of transformers, token for token."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import ImagePart, Message, Role
from tests.vision_families import FAMILIES, NUMBERED, made, write_family
from tokengrove.errors import InvalidRequest

SIZES = ((64, 64), (200, 90), (90, 300), (640, 480))


@pytest.fixture(scope="session", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session")
def renderer_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Loads the renderer of a family. The processor is the made one: not all can be saved without torchvision."""

    @cache
    def load(name: str, template: str = "") -> Renderer:
        folder: Path = tmp_path_factory.mktemp(name)
        write_family(folder, name, template)
        with mock.patch("proxy.vision.processor.load_processor", lambda folder: made(name)[0]):
            return load_renderer(Settings(), folder)

    return load


def conversation(chance: random.Random) -> list[Message]:
    messages = []
    for turn in range(chance.randrange(1, 4)):
        text = chance.choice(["What is this?", "a  b\n", "x"]) * chance.randrange(1, 3)
        places = sorted(chance.randrange(len(text) + 1) for _ in range(chance.randrange(3)))
        images = [ImagePart(f"{turn:064x}", at, *chance.choice(SIZES)) for at in places]
        messages += [Message(Role.USER, text, images=tuple(images)), Message(Role.ASSISTANT, f"answer {turn}")]
    return messages[:-1]


def as_parts(message: Message) -> list[dict[str, str]]:
    """The content of a message as a trainer writes it, part by part."""
    parts, before = [], 0
    for image in message.images:
        parts += [{"type": "text", "text": message.content[before : image.at]}, {"type": "image"}]
        before = image.at
    parts.append({"type": "text", "text": message.content[before:]})
    return [part for part in parts if part.get("text") != ""]


def by_processor(name: str, messages: list[Message]) -> list[int]:
    from PIL import Image

    processor, template = made(name)
    dicts = [{"role": str(message.role), "content": as_parts(message)} for message in messages]
    text = processor.tokenizer.apply_chat_template(
        dicts, chat_template=template, add_generation_prompt=True, tokenize=False
    )
    images = [Image.new("RGB", (image.width, image.height)) for message in messages for image in message.images]
    found: list[int] = processor(text=[text], images=[images] if images else None)["input_ids"][0]
    return found


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32))
def test_prompts_are_those_of_the_familys_processor(renderer_of: Any, family: str, seed: int) -> None:
    renderer, messages = renderer_of(family), conversation(random.Random(seed))
    assert list(renderer.render(messages, (), {})) == by_processor(family, messages)


@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_a_bridged_turn_ends_as_the_full_rendering_does(renderer_of: Any, family: str, seed: int) -> None:
    renderer, history = renderer_of(family), conversation(random.Random(seed))
    new = [Message(Role.USER, "And now?", images=(ImagePart("e" * 64, 3, 200, 90),))]
    prompt = renderer.render(history, (), {})
    whole = renderer.render([*history, Message(Role.ASSISTANT, "It is."), *new], (), {})
    output = renderer.encode("It is.<|im_end|>")
    suffix = renderer.bridge(prompt, output, Message(Role.ASSISTANT, "It is."), new, (), {})
    assert suffix is not None
    assert whole[len(whole) - len(suffix) :] == suffix
    placed = renderer.placed(suffix, new, len(prompt) + len(output))
    assert [image.length for image in placed] == [renderer.placed(whole, [*history, *new])[-1].length]


def test_images_in_a_role_that_the_template_refuses_are_refused_by_name(renderer_of: Any) -> None:
    renderer = renderer_of("gemma3")
    image = (ImagePart("0" * 64, 0, 64, 64),)
    messages = [Message(Role.USER, "Go."), Message(Role.TOOL, "done", tool_call_id="call_0", images=image)]
    with pytest.raises(InvalidRequest, match="cannot express images in tool results; send them in a user message"):
        renderer.render(messages, (), {})


@pytest.mark.parametrize("options", [{"add_vision_id": True}, {}], ids=["numbered", "plain"])
def test_a_template_that_numbers_images_goes_on_counting_in_a_bridged_turn(
    renderer_of: Any, options: dict[str, Any]
) -> None:
    renderer = renderer_of("gemma3", NUMBERED)
    image = ImagePart("0" * 64, 0, 64, 64)
    history = [Message(Role.USER, "Look.", images=(image, image))]
    answer, new = Message(Role.ASSISTANT, "It is."), [Message(Role.USER, "And this?", images=(image, image))]
    prompt, output = renderer.render(history, (), options), renderer.encode("It is.<|im_end|>")
    suffix = renderer.bridge(prompt, output, answer, new, (), options, images_before=2)
    assert prompt + output + suffix == renderer.render([*history, answer, *new], (), options)
    assert ("Picture 4: " in renderer.decode(suffix)) == bool(options)


def test_the_template_of_the_processor_counts_before_that_of_the_tokenizer(tmp_path: Path) -> None:
    """Older folders (LLaVA, Qwen2-VL) have it in chat_template.json."""
    write_family(tmp_path, "llava")
    template = tmp_path / "chat_template.jinja"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template.read_text()}))
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with mock.patch("proxy.vision.processor.load_processor", lambda folder: made("llava")[0]):
        renderer = load_renderer(Settings(), tmp_path)
    messages = [Message(Role.USER, "What?", images=(ImagePart("0" * 64, 0, 64, 64),))]
    assert list(renderer.render(messages, (), {})) == by_processor("llava", messages)
