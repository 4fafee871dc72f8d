"""For every published template and conversation shape, the bridge appends what the template would write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from proxy.rendering import Renderer
from proxy.types import Ids, Message, Role, Tool, ToolCall, ids_of
from tests.unit.proxy.rendering.rendering_folders import FAMILIES
from tests.wide import CROSSED
from tokengrove.errors import InvalidRequest

TOOLS = (Tool("read", "Read a file.", {"type": "object", "properties": {"path": {"type": "string"}}}),)
CALL, OTHER = ToolCall("call_0", "read", '{"path": "a"}'), ToolCall("call_1", "read", '{"path": "b"}')


def user(text: str) -> Message:
    return Message(Role.USER, text)


def system(text: str) -> Message:
    return Message(Role.SYSTEM, text)


def assistant(text: str, *calls: ToolCall, reasoning: str | None = None) -> Message:
    return Message(Role.ASSISTANT, text, calls, reasoning=reasoning)


def result(text: str, call_id: str) -> Message:
    return Message(Role.TOOL, text, (), call_id)


@dataclass(frozen=True)
class Shape:
    history: list[Message]
    answer: Message
    new: list[Message]
    tools: tuple[Tool, ...] = ()


YO = assistant("Yo there")
LOOP = [user("Hi"), assistant("", CALL), result("42", "call_0")]
SHAPES = {
    "system and user": Shape([system("Sys"), user("Hi")], YO, [user("Again?")]),
    "tools": Shape([system("Sys"), user("Hi")], YO, [user("Again?")], TOOLS),
    "tool loop": Shape([user("Hi")], assistant("", CALL), [result("42", "call_0")], TOOLS),
    "tool loop with text": Shape([user("Hi")], assistant("Look now", CALL), [result("42", "call_0")], TOOLS),
    "second tool loop": Shape(LOOP, assistant("", OTHER), [result("43", "call_1")], TOOLS),
    "after a tool loop": Shape(LOOP, assistant("It is 42"), [user("Thanks")], TOOLS),
    "parallel tools": Shape(
        [user("Hi")], assistant("", CALL, OTHER), [result("42", "call_0"), result("43", "call_1")], TOOLS
    ),
    "result and user": Shape([user("Hi")], assistant("", CALL), [result("42", "call_0"), user("ok")], TOOLS),
    "reasoning": Shape([user("Hi")], assistant("Yo there", reasoning="hm so"), [user("Again?")]),
    "reasoning and call": Shape([user("Hi")], assistant("", CALL, reasoning="hm so"), [result("42", "call_0")], TOOLS),
    "foreign answer": Shape([user("Hi")], YO, [user("x"), assistant("Bee"), user("c")]),
    "foreign call": Shape([user("Hi")], YO, [user("x"), assistant("", CALL), result("1", "call_0")], TOOLS),
    "foreign answer first": Shape([user("Hi")], YO, [assistant("Bee"), user("c")]),
    "foreign answer after a call": Shape(
        [user("Hi")], assistant("", CALL), [result("1", "call_0"), assistant("Bee"), user("c")], TOOLS
    ),
    "no new messages": Shape([user("Hi")], YO, []),
    "late system": Shape([system("Sys"), user("Hi")], YO, [system("Late"), user("c")]),
    "two users": Shape([user("Hi")], YO, [user("b"), user("c")]),
    "marker text": Shape([user("Hi")], YO, [user("<|im_end|> <tool_call> <|eot_id|>")]),
}
# What each template cannot express and refuses with a 400. No template accepts an image.
NO_TOOLS = {name for name, shape in SHAPES.items() if shape.tools}
REFUSED = {
    "cohere2": NO_TOOLS | {"foreign answer first", "two users"},
    "gemma3": NO_TOOLS | {"foreign answer first", "two users", "late system"},
    "phi3": NO_TOOLS,
    "deepseekv3": NO_TOOLS,
    "llama3_1": {"parallel tools"},
    "gptoss": {"parallel tools", "late system"},
    "qwen3_5_think": {"late system"},
    "qwen3_8": {"late system"},
}
# GLM ends a turn by opening the next one: if the model opened another role, that opener stays and the right one
# follows. Here `sampled` cuts at the first opener that ends a turn, which is not the one after the answer.
OTHER_ROLE = {("glm4moe", "foreign answer first"), ("glm4moe", "late system")}
# In history, these templates begin an answer differently from their generation prompt, or strip reasoning. The sampled
# tokens stay.
REWRITES = {"qwen3_5_think", "qwen3_8", "nemotron_3_nano", "deepseekv3"}


def sampled(renderer: Renderer, name: str, shape: Shape, prompt: Ids, whole: Ids) -> tuple[Ids, bool]:
    """Return the answer as the full rendering writes it, and whether that rendering begins with the prompt.

    gpt-oss ends an answer with `<|return|>`, which its template replaces in history.
    """
    ends = set(renderer.stop_token_ids)
    if name == "gptoss":
        ends = set(renderer.encode("<|call|>" if shape.answer.tool_calls else "<|end|>"))
    if shape.new and whole[: len(prompt)] == prompt:
        close = next(at for at in range(len(prompt), len(whole)) if whole[at] in ends)
        return whole[len(prompt) : close + 1], True
    return renderer.encode("Yo there") + ids_of([renderer.stop_token_ids[0]]), False


@CROSSED
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_bridged_turn_is_what_the_template_writes(spelled: Callable[[str], Renderer], name: str, case: str) -> None:
    renderer, shape = spelled(name), SHAPES[case]
    conversation = [*shape.history, shape.answer, *shape.new]
    if case in REFUSED.get(name, ()):
        with pytest.raises(InvalidRequest, match="cannot express"):
            renderer.render(conversation, shape.tools, {})
        return
    prompt, whole = renderer.render(shape.history, shape.tools, {}), renderer.render(conversation, shape.tools, {})
    output, taken = sampled(renderer, name, shape, prompt, whole)
    suffix = renderer.bridge(prompt, output, shape.answer, shape.new, shape.tools, {})
    if (name, case) == ("deepseekv3", "late system"):
        assert suffix is None  # its template moves every system message to the head
        return
    assert suffix is not None
    assert taken or name in REWRITES or case == "no new messages"
    if taken and (name, case) not in OTHER_ROLE:
        assert prompt + output + suffix == whole
    assert whole[len(whole) - len(suffix) :] == suffix


@pytest.mark.parametrize("name", FAMILIES)
def test_a_cut_turn_is_closed_as_the_template_closes_one(spelled: Callable[[str], Renderer], name: str) -> None:
    renderer = spelled(name)
    history, new = [user("Hi")], [user("Again?")]
    prompt = renderer.render(history, (), {})
    thought = "" if renderer.reasoning is None else f"{renderer.reasoning.opener}hm{renderer.reasoning.closer}"
    suffix = renderer.bridge(prompt, renderer.encode(thought + "Yo there"), assistant("Yo there"), new, (), {})
    assert suffix is not None
    whole = renderer.render([*history, assistant("Yo there"), *new], (), {})
    assert whole[len(whole) - len(suffix) :] == suffix
    assert renderer.decode(whole[: len(whole) - len(suffix)]).endswith("Yo there")


def test_gpt_oss_keeps_the_sampled_end_of_a_turn(spelled: Callable[[str], Renderer]) -> None:
    renderer = spelled("gptoss")
    prompt = renderer.render([user("Hi")], (), {})
    said = "<|channel|>final<|message|>Yo<|return|>"
    after = renderer.bridge(prompt, renderer.encode(said), assistant("Yo"), [user("x")], (), {})
    assert after is not None
    assert renderer.decode(after) == "<|start|>user<|message|>x<|end|><|start|>assistant"
    for cut, closer in (
        ("<|channel|>analysis<|message|>hm", "<|end|>"),
        ("<|channel|>analysis<|message|>hm<|end|>", ""),
    ):
        after = renderer.bridge(prompt, renderer.encode(cut), assistant(""), [user("x")], (), {})
        assert after is not None
        assert renderer.decode(after) == f"{closer}<|start|>user<|message|>x<|end|><|start|>assistant"


def test_a_closer_that_was_sampled_before_the_cut_is_not_repeated(spelled: Callable[[str], Renderer]) -> None:
    renderer = spelled("cohere2")
    prompt, output = renderer.render([user("Hi")], (), {}), renderer.encode("Yo<|END_RESPONSE|>")
    suffix = renderer.bridge(prompt, output, assistant("Yo"), [user("x")], (), {})
    assert suffix is not None
    assert renderer.decode(suffix).startswith("<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>x")
