"""The agents of the demo, with the stock `openai` package, and the lessons of the model that answers them.

An agent has only an address and a key, and does not know this project. It returns the reward of each turn that has one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from tokengrove.demos.lesson import Lesson

if TYPE_CHECKING:
    from openai import OpenAI
    from openai.types.chat import ChatCompletionMessageFunctionToolCall

Message = dict[str, Any]
Say = Callable[[str, str], None]
"""Tells who said something, and what: one line of a transcript."""
Agent = Callable[["OpenAI", int, Say], dict[str, float]]
"""Called with a client, the seed of its turns and Say; returns the rewards by the id of the turn's reply."""

_HEIGHTS = {"Oak.": "30 m.", "Elm.": "35 m.", "Pine.": "40 m."}
_TERSE: Message = {"role": "system", "content": "You are terse."}
_NAME, _ANOTHER, _HEIGHT = "Name a tree.", "And another one?", "How tall does it grow?"
_SUM, _RIGHT = "What is 17 plus 25? Use the tool.", 42
_ARGUMENTS = ({"a": 17, "b": 25}, {"a": 17, "b": 52})
"""The second of them makes a wrong sum, so that rewards differ."""
_NUMBER = {"type": "integer"}
_ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {"type": "object", "properties": {"a": _NUMBER, "b": _NUMBER}, "required": ["a", "b"]},
    },
}
_MOST_TOKENS = 64
"""Far above the longest answer of the lessons."""


def add(a: int, b: int) -> int:
    """The tool: a function that runs in the agent's process."""
    return a + b


def chat_agent(openai: OpenAI, seed: int, say: Say) -> dict[str, float]:
    """Ask for two trees, then go back to the first and ask how tall it is: the conversation forks.

    The second tree is worth 1 if it is another one, the height 1 if it is that of the tree.
    """
    named = [_TERSE, _user(_NAME)]
    tree, _ = _streamed(openai, named, seed, say)
    named += [_assistant(tree)]
    another, turn = _streamed(openai, [*named, _user(_ANOTHER)], seed + 1, say)
    say("", f"(back at {tree!r}, the agent asks something else: a fork)")
    height, forked = _streamed(openai, [*named, _user(_HEIGHT)], seed, say)
    return {turn: float(another != tree), forked: float(height == _HEIGHTS.get(tree))}


def tool_agent(openai: OpenAI, seed: int, say: Say) -> dict[str, float]:
    """Ask for a sum, run the calls that the model decides to make, and let it answer. A right answer is worth 1."""
    messages = [_user(_SUM)]
    say("user", _SUM)
    asked = openai.chat.completions.create(**_asking(messages, seed), tools=[_ADD])
    called = asked.choices[0].message
    calls = [call for call in called.tool_calls or () if call.type == "function"]
    if not calls:
        say("model", called.content or "(no text)")
        return {asked.id: 0.0}
    messages.append(called.model_dump(exclude_none=True))
    messages += [_result(call, say) for call in calls]
    answered = openai.chat.completions.create(**_asking(messages, seed), tools=[_ADD])
    answer = answered.choices[0].message.content or "(no text)"
    say("model", answer)
    return {answered.id: float(str(_RIGHT) in answer)}


def _asking(messages: list[Message], seed: int) -> Any:
    return {"model": "demo", "messages": messages, "max_tokens": _MOST_TOKENS, "seed": seed}


def _streamed(openai: OpenAI, messages: list[Message], seed: int, say: Say) -> tuple[str, str]:
    """The text of the model's reply and its id, said as it was asked."""
    text, turn = "", ""
    for chunk in openai.chat.completions.create(**_asking(messages, seed), stream=True):
        turn = chunk.id
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    say("user", messages[-1]["content"])
    say("model", text)
    return text, turn


def _result(call: ChatCompletionMessageFunctionToolCall, say: Say) -> Message:
    """The message with the result of a call. A model may send arguments that do not fit; it is told so."""
    say("call", f"{call.function.name}({call.function.arguments})")
    try:
        result = str(add(**json.loads(call.function.arguments)))
    except (ValueError, TypeError) as error:
        result = f"error: {error}"
    say("tool", result)
    return {"role": "tool", "tool_call_id": call.id, "content": result}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def lessons() -> Iterator[Lesson]:
    """What the built-in model is taught, so that it answers both agents with words and with calls of the tool."""
    trees = tuple(_HEIGHTS)
    yield Lesson((_TERSE, _user(_NAME)), trees)
    for tree, height in _HEIGHTS.items():
        named = (_TERSE, _user(_NAME), _assistant(tree))
        yield Lesson((*named, _user(_ANOTHER)), trees)
        yield Lesson((*named, _user(_HEIGHT)), (height,))
    yield Lesson((_user(_SUM),), tuple(map(_call_text, _ARGUMENTS)), (_ADD,))
    for arguments in _ARGUMENTS:
        total = add(**arguments)
        function = {"name": "add", "arguments": json.dumps(arguments)}
        called = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
        told = {"role": "tool", "tool_call_id": "1", "content": str(total)}
        yield Lesson((_user(_SUM), called, told), (f"It is {total}.",), (_ADD,))


def _call_text(arguments: dict[str, int]) -> str:
    """A call as the chat template of the built-in model writes it."""
    return f'<tool_call>\n{{"name": "add", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
