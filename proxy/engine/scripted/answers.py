"""The next answer of the acting script: the tools to call, with words for their arguments, or a text.

Pure and deterministic: the answer depends on the conversation alone. It follows simple instructions ("say exactly:
...", "count from 1 to 5"), reports tool results, and otherwise repeats the question in a short sentence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from proxy.engine.scripted.instances import Mentions, instance, mentioned_words
from proxy.types import Message, Role, Tool, ToolCall, ToolChoiceMode, TurnRequest
from tokengrove.errors import UnsupportedParameter

_RESULT_LIMIT = 2_000
_NOTHING_TO_CALL = re.compile(
    r"\b(?:without|do not use|don't use|no) (?:any |the )?tools?\b|^\W*(?:hi|hello)\W*$", re.I
)
_SEVERAL = re.compile(r"\b(?:both|each|all|parallel|several|twice)\b|\band\b|,", re.I)
_EXACT = re.compile(
    r"\b(?:reply|respond|answer|say|repeat|output|print|write)\b[^\"'“:\n]*?\b(?:exactly|verbatim|only|just)\b"
    r"(?: with)?(?: th(?:e|is|ese) (?:word|words|text|phrase|string|sentence))?[^:\"“\n]*?(?::\s*|(?=[\"“]))(.+)",
    re.I | re.S,
)
_WORD = re.compile(
    r"\b(?:reply|respond|answer|say)\b(?: with)? (?:exactly|only|just)(?: the (?:word|text|number))? (\w+)\W*$", re.I
)
_COUNT = re.compile(r"\bcount\b.*?\b(\d{1,4})\b.*?\bto\b.*?\b(\d{1,4})\b", re.I | re.S)
_SUM = re.compile(r"(-?\d{1,9})\s*([+*x\u00d7-])\s*(-?\d{1,9})")
_MY_NAME = re.compile(r"\bmy name is (\w+)", re.I)
_ASKS_NAME = re.compile(r"\bwhat(?:'s| is) my name\b", re.I)
_LONG = re.compile(r"\b(?:essay|story|long|length|poem|haikus?|paragraphs?|explain|detail)\b", re.I)
_LAST_TOOL = re.compile(r"final|submit|finish|done|complete", re.I)


def planned_calls(turn: TurnRequest) -> list[tuple[Tool, Mentions]]:
    """The tools that the answer calls, each with words for its arguments; empty if the answer is text."""
    if not turn.tools or turn.tool_choice.mode is ToolChoiceMode.NONE:
        return []
    asked, answered = latest_question(turn.messages), bool(latest_results(turn.messages))
    if turn.tool_choice.mode is ToolChoiceMode.AUTO and (answered or not _wants_call(turn, asked)):
        return []
    tools = _chosen_tools(turn, asked, answered)
    if answered:  # a forced call after results can only submit them
        return [(tools[0], Mentions(results_text(turn.messages)))]
    if len(tools) > 1 and turn.parallel_tool_calls:
        return [(tool, Mentions.of(asked)) for tool in tools]
    return [(tools[0], mentions) for mentions in _rounds(tools[0], asked, turn.parallel_tool_calls)]


def formatted_answer(turn: TurnRequest) -> str | None:
    """A text in the response format of the request; None if it has none.

    Raises UnsupportedParameter for a regular expression or a grammar.
    """
    wanted = turn.response_format
    if wanted is None:
        return None
    asked = latest_question(turn.messages)
    if wanted.regex is not None or wanted.ebnf is not None:
        message = f"'{wanted.param}' is not supported by the scripted engine; it writes JSON and choices only"
        raise UnsupportedParameter(message, param=wanted.param)
    if wanted.choices:
        return next((choice for choice in wanted.choices if choice in asked), wanted.choices[0])
    schema = wanted.schema
    if schema is None:
        keys = mentioned_words(asked) or ["answer"]
        return json.dumps({key: key for key in keys}, ensure_ascii=False)
    return json.dumps(instance(schema, Mentions.of(asked)), ensure_ascii=False)


def text_answer(turn: TurnRequest) -> str:
    """The text of the answer: tool results, the result of an instruction, or a sentence about the question."""
    if latest_results(turn.messages):
        return f"Here is what came back: {results_text(turn.messages)}"
    asked = latest_question(turn.messages)
    for rule in (_ordered_answer, _name_answer, _exact_answer, _count_answer, _sum_answer):
        if (answer := rule(turn, asked)) is not None:
            return answer
    about = " ".join(asked.split())[:120] or "nothing in particular"
    sentence = f"You asked me about this: {about} I have thought about it, and here is my short and friendly answer."
    return " ".join([sentence, *_padding(asked)])


def latest_question(messages: Sequence[Message]) -> str:
    """The text of the latest user message that is not an observation (a tool result as text)."""
    texts = (m.content for m in reversed(messages) if m.role is Role.USER and not _is_observation(m))
    return next((text for text in texts if text.strip()), "")


def latest_results(messages: Sequence[Message]) -> list[Message]:
    """The tool results since the last answer, in order. Some agents send them as user messages ("Observation: ...")."""
    since: list[Message] = []
    for message in reversed(messages):
        if message.role is Role.ASSISTANT:
            break
        since.append(message)
    return [message for message in reversed(since) if message.role is Role.TOOL or _is_observation(message)]


def results_text(messages: Sequence[Message]) -> str:
    """The latest tool results, joined and cut to 2,000 characters."""
    return "; ".join(m.content.removeprefix("Observation:").strip() for m in latest_results(messages))[:_RESULT_LIMIT]


def _is_observation(message: Message) -> bool:
    return message.role is Role.USER and message.content.startswith("Observation:")


def _wants_call(turn: TurnRequest, asked: str) -> bool:
    return turn.messages[-1].role is not Role.ASSISTANT and not _NOTHING_TO_CALL.search(asked)


def _chosen_tools(turn: TurnRequest, asked: str, answered: bool) -> list[Tool]:
    """The tools to call, best match with the question first; never empty."""
    if turn.tool_choice.mode is ToolChoiceMode.NAMED:
        return [tool for tool in turn.tools if tool.name == turn.tool_choice.name] or list(turn.tools[:1])
    last = [tool for tool in turn.tools if _LAST_TOOL.search(tool.name)]
    if answered:
        called = {call.name for call in _past_calls(turn.messages)}
        return last or [tool for tool in turn.tools if tool.name not in called] or list(turn.tools[:1])
    others = [tool for tool in turn.tools if tool not in last] or last
    scores = {tool.name: _mentions_of_tool(tool, asked) for tool in others}
    ranked = sorted(others, key=lambda tool: -scores[tool.name])
    wanted = [tool for tool in ranked if scores[tool.name]] if _SEVERAL.search(asked) else ranked[:1]
    return wanted or ranked[:1]


def _past_calls(messages: Sequence[Message]) -> list[ToolCall]:
    return [call for message in messages for call in message.tool_calls]


def _mentions_of_tool(tool: Tool, asked: str) -> int:
    """The score of a tool: 100 if the question has its whole name, else the number of the name's longer words in it."""
    text = asked.lower()
    if re.search(rf"\b{re.escape(tool.name.lower())}\b", text):
        return 100
    return sum(word in text for word in re.split(r"[\W_]+", tool.name.lower()) if len(word) > 3)


def _rounds(tool: Tool, asked: str, parallel: bool) -> list[Mentions]:
    """Words for each call: one call, or one per word if the tool takes one string and the question names several."""
    mentions = Mentions.of(asked)
    properties = tool.parameters.get("properties") or {}
    keys = tool.parameters.get("required") or list(properties)
    single = len(keys) == 1 and (properties.get(keys[0]) or {}).get("type") == "string"
    if parallel and single and len(mentions.words) > 1 and re.search(r"\b(?:and|both|each)\b", asked):
        return [replace(mentions, words=[word]) for word in mentions.words[:4]]
    return [mentions]


def _ordered_answer(turn: TurnRequest, asked: str) -> str | None:
    """The answer that a system message prescribes for every question."""
    orders = (
        _exact_answer(turn, m.content)
        for m in turn.messages
        if m.role is Role.SYSTEM and "whatever" in m.content.lower()
    )
    return next(filter(None, orders), None)


def _name_answer(turn: TurnRequest, asked: str) -> str | None:
    told = [found for m in turn.messages if m.role is Role.USER for found in _MY_NAME.findall(m.content)]
    return told[-1] if told and _ASKS_NAME.search(asked) else None


def _exact_answer(turn: TurnRequest, asked: str) -> str | None:
    if found := _EXACT.search(asked):
        text = found[1].strip()
        quoted = re.match(r"[\"“](.+?)[\"”]", text, re.S)
        return quoted[1] if quoted else text
    word = _WORD.search(asked)
    return word[1] if word else None


def _count_answer(turn: TurnRequest, asked: str) -> str | None:
    found = _COUNT.search(asked)
    return ", ".join(map(str, range(int(found[1]), int(found[2]) + 1))) if found else None


def _sum_answer(turn: TurnRequest, asked: str) -> str | None:
    found = _SUM.search(asked)
    if found is None:
        return None
    a, b = int(found[1]), int(found[3])
    operations: dict[str, Callable[[], int]] = {"+": lambda: a + b, "-": lambda: a - b}
    return str(operations.get(found[2], lambda: a * b)())


def _padding(asked: str) -> list[str]:
    """Sentences that lengthen the answer, if the question asks for a long text."""
    count = 24 if _LONG.search(asked) else 0
    return [f"This is sentence number {number} of what I have to say about it." for number in range(1, count + 1)]
