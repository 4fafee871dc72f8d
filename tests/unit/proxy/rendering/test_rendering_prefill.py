"""A prefilled prompt is the template's own text of the conversation, up to the end of what the client wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rendering_folders import ENDS, QUICK

from proxy.rendering import Renderer, load_renderer
from proxy.rendering.deltas import ReasoningDelta, TextDelta
from proxy.rendering.prefill import Prefills
from proxy.rendering.reasoning_formats import reasoning_format
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.settings import Settings
from proxy.types import Message, Role, Tool, ToolChoice
from tests.wide import CROSSED, WIDE

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
CONVERSATION = (
    Message(Role.USER, "Hi"),
    Message(Role.ASSISTANT, "Hello."),
    Message(Role.USER, "Please answer."),
)
TEXT = "The answer, as I said, is"


WITHOUT_TOOLS = ("cohere2", "gemma3", "phi3", "deepseekv3")
TEMPLATES = [*((name, ()) for name in ENDS), *((name, TOOLS) for name in ENDS if name not in WITHOUT_TOOLS)]


@CROSSED
@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}], ids=["default", "silent"])
@pytest.mark.parametrize(
    ("name", "tools"),
    [row if row[0] in ("deepseekv3", "glm4moe", *QUICK) else pytest.param(*row, marks=WIDE) for row in TEMPLATES],
)
def test_a_prefilled_prompt_ends_with_the_answers_beginning_as_the_template_writes_it(
    spelled: Callable[[str], Renderer], name: str, options: dict[str, Any], tools: tuple[Tool, ...]
) -> None:
    renderer = spelled(name)
    prefill = Message(Role.ASSISTANT, TEXT)
    asked = renderer.render(CONVERSATION, tools, options)
    written = renderer.decode(renderer.render([*CONVERSATION, prefill], tools, options, prompt=False))
    head, found, _ = written.rpartition(TEXT)
    assert found
    prompt = renderer.prefilled(asked, prefill, tools, options)
    assert renderer.decode(prompt) == head + TEXT
    parser = renderer.parser(tools, ToolChoice(), prompt, prefill=prefill)
    deltas = [*parser.feed(renderer.encode(" 42, <b>not</b> 41.")), *parser.finish()]
    assert "".join(delta.text for delta in deltas if isinstance(delta, TextDelta)) == " 42, <b>not</b> 41."
    assert parser.message == Message(Role.ASSISTANT, f"{TEXT} 42, <b>not</b> 41.")


@pytest.mark.parametrize("name", ["qwen3", "glm4moe", "nemotron_3_nano"])
def test_the_reasoning_before_a_prefill_is_written_as_in_the_template(
    spelled: Callable[[str], Renderer], name: str
) -> None:
    renderer = spelled(name)
    prefill = Message(Role.ASSISTANT, TEXT, reasoning="It is easy.")
    prompt = renderer.prefilled(renderer.render(CONVERSATION, (), {}), prefill, (), {})
    written = renderer.decode(renderer.render([*CONVERSATION, prefill], (), {}, prompt=False))
    assert "It is easy." in written
    assert renderer.decode(prompt) == written.rpartition(TEXT)[0] + TEXT


def test_a_prefill_closes_reasoning_that_another_generation_prompt_opens(spelled: Callable[[str], Renderer]) -> None:
    renderer = spelled("qwen3_5_think")
    opened = renderer.encode("<|im_start|>assistant\nunusual <think> ")
    prompt = renderer.prefilled(opened, Message(Role.ASSISTANT, TEXT), (), {})
    assert renderer.decode(prompt) == f"<|im_start|>assistant\nunusual <think> </think>\n\n{TEXT}"


@pytest.mark.parametrize("text", [TEXT, "word " * 100 + "end", "a <think> b"])
def test_a_cut_answer_after_a_prefill_is_closed_without_the_end_of_reasoning(tiny_folder: Path, text: str) -> None:
    renderer = load_renderer(Settings(reasoning_parser="deepseek-r1"), tiny_folder)
    prefill = Message(Role.ASSISTANT, text)
    prompt = renderer.prefilled(renderer.render(CONVERSATION, (), {}), prefill, (), {})
    output = renderer.encode(" cut here")
    answer = Message(Role.ASSISTANT, f"{text} cut here")
    suffix = renderer.bridge(prompt, output, answer, (Message(Role.USER, "More?"),), (), {}, prefilled=True)
    assert suffix is not None
    assert renderer.decode(suffix).startswith("<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant")


def test_a_library_renderer_is_prefilled_alike(tiny_folder: Path) -> None:
    tokenizer = Tokenizer.load(tiny_folder)
    library = LibraryTemplate("qwen3", tokenizer)
    prefills = Prefills(tokenizer, library, reasoning_format("think"), lambda ids: False)
    prefill = Message(Role.ASSISTANT, TEXT)
    written = tokenizer.decode(library.render([*CONVERSATION, prefill], (), {}, prompt=False))
    prompt = prefills.added(library.render(CONVERSATION, (), {}), prefill, (), {})
    assert tokenizer.decode(prompt) == written.rpartition(TEXT)[0] + TEXT


PIECES = [
    "a",
    " ",
    "\n",
    "END",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    '{"name": "read", "arguments": {}}',
]


@given(
    begun=st.lists(st.sampled_from(PIECES), min_size=1).map("".join),
    reasoning=st.none() | st.just("hm"),
    output=st.lists(st.sampled_from(PIECES)).map("".join),
    stop=st.sampled_from([(), ("END",), ("a a",)]),
)
def test_an_answer_is_what_the_client_wrote_and_then_the_deltas(
    tiny: Renderer, begun: str, reasoning: str | None, output: str, stop: tuple[str, ...]
) -> None:
    prefill = Message(Role.ASSISTANT, begun, reasoning=reasoning)
    parser = tiny.parser(TOOLS, ToolChoice(), tiny.encode(begun), stop, lambda: "c", prefill)
    deltas = [*parser.feed(tiny.encode(output)), *parser.finish()]
    assert parser.message.content == begun + "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert parser.message.reasoning == reasoning
    assert not any(isinstance(delta, ReasoningDelta) for delta in deltas)
