"""An answer that somebody else wrote becomes the ids that the model itself would have sampled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rendering_folders import ENDS, QUICK

from proxy.rendering import Renderer
from proxy.rendering.written_answers import write_delivered
from proxy.types import Api, Message, Role, Tool, ToolCall, TurnRequest
from tests.wide import few
from tokengrove.errors import InvalidRequest

ASK = Message(Role.USER, "What does a.txt say?")
READ = Tool("read_file", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
CALLS = tuple(ToolCall(f"x{at}", "read_file", f'{{"path": "{at}.txt"}}') for at in range(2))


def answer(text: str = "", *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning)


def written(renderer: Renderer, message: Message, *tools: Tool) -> str:
    """The text of a delivered answer."""
    asked = TurnRequest(Api.CHAT, "m", (ASK,), tools)
    return renderer.decode(write_delivered(renderer, asked, renderer.render([ASK], tools, {}), message))


def test_text_reasoning_and_calls_are_in_the_format_of_the_family(tiny: Renderer) -> None:
    assert written(tiny, answer("Nothing.")) == "<think>\n\n</think>\n\nNothing.<|im_end|>"
    thought = written(tiny, answer("", CALLS[0], reasoning="I read it."), READ)
    assert thought == (
        "<think>\nI read it.\n</think>\n\n"
        '<tool_call>\n{"name": "read_file", "arguments": {"path": "0.txt"}}\n</tool_call><|im_end|>'
    )


def test_a_text_that_the_template_would_shorten_is_the_text_itself(tiny: Renderer) -> None:
    assert written(tiny, answer("a </think> b")) == "a </think> b<|im_end|>"


def test_text_beside_several_calls_is_kept(tiny: Renderer) -> None:
    both = written(tiny, answer("I read both.", *CALLS), READ)
    assert both.index("I read both.") < both.index("0.txt") < both.index("1.txt")


def test_reasoning_is_refused_by_a_family_that_has_none(spelled: Callable[[str], Renderer]) -> None:
    with pytest.raises(InvalidRequest, match="reasoning_content would be read as ''"):
        written(spelled("qwen2_5"), answer("Nothing.", reasoning="I read it."))


@pytest.mark.parametrize("name", few(sorted(ENDS.keys() - {"cohere2"}), QUICK))  # its end marker is read as text
def test_every_published_family_reads_back_a_text(spelled: Callable[[str], Renderer], name: str) -> None:
    renderer = spelled(name)
    assert "It says nothing." in written(renderer, answer("It says nothing."))


@pytest.mark.parametrize(
    "name", few(["glm4moe", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think"], QUICK[1:])
)
def test_families_with_tools_read_back_a_call(spelled: Callable[[str], Renderer], name: str) -> None:
    assert "read_file" in written(spelled(name), answer("", CALLS[0]), READ)


@pytest.mark.parametrize(
    ("message", "tools", "part"),
    [
        (answer("", CALLS[0]), (), "tool_calls"),
        (answer("one<|im_end|>two"), (), "content"),
        (answer('<tool_call>\n{"name": "read_file", "arguments": {}}\n</tool_call>'), (READ,), "tool_calls"),
    ],
    ids=["a call without tools", "an end token in the text", "a call in the text"],
)
def test_what_would_be_read_back_otherwise_is_refused(
    tiny: Renderer, message: Message, tools: tuple[Tool], part: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"whose {part} would be read as .*; deliver 'text' or") as refused:
        written(tiny, message, *tools)
    assert refused.value.param == "message"
