"""The raw text of an output, as a reply gives it on request, is read as the same message again in every family."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rendering_folders import QUICK

from proxy.rendering import Renderer
from proxy.rendering.written_answers import write_delivered
from proxy.types import Api, Ids, Message, Parsing, Role, Tool, ToolCall, TurnRequest, ids_of
from tests.wide import few

ASK = Message(Role.USER, "What does a.txt say?")
READ = Tool("read_file", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}})
CALL = ToolCall("x", "read_file", '{"path": "a.txt"}')
WITH_TOOLS = ["glm4moe", "llama3_1", "nemotron_3_nano", "qwen2_5", "qwen3", "qwen3_5_think"]
WITH_REASONING = ["glm4moe", "nemotron_3_nano", "qwen3", "qwen3_5_think"]


def delivered(renderer: Renderer, text: str) -> Ids:
    """The ids of a text that is delivered to a mailbox: with an end token, unless it has one."""
    ids = renderer.encode(text)
    return ids if ids and ids[-1] in renderer.stop_token_ids else ids + ids_of(renderer.stop_token_ids[:1])


def same_again(renderer: Renderer, message: Message, *tools: Tool) -> None:
    prompt = renderer.render([ASK], tools, {})
    ids = write_delivered(renderer, TurnRequest(Api.CHAT, "m", (ASK,), tools), prompt, message)
    text, reading = renderer.raw_text(ids), Parsing(tools=tools, prompt_ids=prompt)
    assert not any(renderer.decode([end]) in text for end in renderer.stop_token_ids if end == ids[-1])
    read = [renderer.parse(found, reading)[0] for found in (ids, delivered(renderer, text))]
    calls = [[(call.name, call.arguments) for call in found.tool_calls] for found in read]
    assert calls[0] == calls[1] and len(calls[0]) == len(message.tool_calls)
    assert (read[0].content, read[0].reasoning) == (read[1].content, read[1].reasoning)


@pytest.mark.parametrize("name", ["gptoss", "qwen2_5", "qwen3"])
def test_a_text_is_the_same_again(spelled: Callable[[str], Renderer], name: str) -> None:
    same_again(spelled(name), Message(Role.ASSISTANT, "It says nothing."))


@pytest.mark.parametrize("name", few(WITH_TOOLS, QUICK[1:]))
def test_a_call_is_the_same_again(spelled: Callable[[str], Renderer], name: str) -> None:
    same_again(spelled(name), Message(Role.ASSISTANT, "", (CALL,)), READ)


@pytest.mark.parametrize("name", few(WITH_REASONING, ("glm4moe", *QUICK[2:])))
def test_reasoning_is_the_same_again(spelled: Callable[[str], Renderer], name: str) -> None:
    same_again(spelled(name), Message(Role.ASSISTANT, "Nothing.", reasoning="I have read it."), READ)
