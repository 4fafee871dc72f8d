"""The same two calls in every format, as the published chat template or documentation of a family writes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.rendering import OutputParser
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.rendering.parsing.parser_factory import ParserFactory
from proxy.rendering.reasoning_formats import reasoning_format
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.templates.message_dicts import tool_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.known_formats import tool_format
from proxy.types import Message, Tool

SCHEMA = {
    "type": "object",
    "properties": {
        "path": {"type": "string"},
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "any": {},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "list": {"type": ["array", "null"]},
    },
}
TOOLS = (Tool("read", "Read a file.", SCHEMA), Tool("list", "List files."))
EXPECTED = [("read", {"path": "a é.txt", "n": 2}), ("list", {})]


def _deepseek(*words: str) -> str:
    return "<\uff5ctool\u2581" + "\u2581".join(words) + "\uff5c>"


def _dsml(block: str) -> str:
    return (
        f"<\uff5cDSML\uff5c{block}>\n"
        '<\uff5cDSML\uff5cinvoke name="read">\n'
        '<\uff5cDSML\uff5cparameter name="path" string="true">a é.txt</\uff5cDSML\uff5cparameter>\n'
        '<\uff5cDSML\uff5cparameter name="n" string="false">2</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>\n"
        '<\uff5cDSML\uff5cinvoke name="list">\n</\uff5cDSML\uff5cinvoke>\n'
        f"</\uff5cDSML\uff5c{block}>"
    )


_XML = (
    "<function=read>\n<parameter=path>\na é.txt\n</parameter>\n<parameter=n>\n2\n</parameter>\n</function>",
    "<function=list>\n</function>",
)
_ARRAY = '[{"name": "read", "arguments": {"path": "a é.txt", "n": 2}}, {"name": "list", "arguments": {}}]'
_PYTHON = '[read(path="a é.txt", n=2), list()]'

SAMPLES: Mapping[str, str] = {
    "hermes": (
        '<tool_call>\n{"name": "read", "arguments": {"path": "a é.txt", "n": 2}}\n</tool_call>\n'
        '<tool_call>\n{"name": "list", "arguments": {}}\n</tool_call>'
    ),
    "longcat": (
        '<longcat_tool_call>\n{"name": "read", "arguments": {"path": "a é.txt", "n": 2}}\n</longcat_tool_call>'
        '<longcat_tool_call>\n{"name": "list", "arguments": {}}\n</longcat_tool_call>'
    ),
    "qwen3_coder": "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in _XML),
    "seed_oss": "\n".join(f"<seed:tool_call>\n{call}\n</seed:tool_call>" for call in _XML),
    "glm45": (
        "<tool_call>read\n<arg_key>path</arg_key>\n<arg_value>a é.txt</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>list\n</tool_call>"
    ),
    "minimax-m2": (
        '<minimax:tool_call>\n<invoke name="read">\n<parameter name="path">a é.txt</parameter>\n'
        '<parameter name="n">2</parameter>\n</invoke>\n<invoke name="list">\n</invoke>\n</minimax:tool_call>'
    ),
    "deepseekv3": (
        f"{_deepseek('calls', 'begin')}{_deepseek('call', 'begin')}function{_deepseek('sep')}read\n```json\n"
        f'{{"path": "a é.txt", "n": 2}}\n```{_deepseek("call", "end")}\n'
        f"{_deepseek('call', 'begin')}function{_deepseek('sep')}list\n```json\n{{}}\n```"
        f"{_deepseek('call', 'end')}{_deepseek('calls', 'end')}"
    ),
    "deepseekv31": (
        f"{_deepseek('calls', 'begin')}{_deepseek('call', 'begin')}read{_deepseek('sep')}"
        f'{{"path": "a é.txt", "n": 2}}{_deepseek("call", "end")}{_deepseek("call", "begin")}list'
        f"{_deepseek('sep')}{{}}{_deepseek('call', 'end')}{_deepseek('calls', 'end')}"
    ),
    "deepseekv32": _dsml("function_calls"),
    "deepseekv4": _dsml("tool_calls"),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.read:0<|tool_call_argument_begin|>"
        '{"path": "a é.txt", "n": 2}<|tool_call_end|><|tool_call_begin|>functions.list:1'
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "mistral": f"[TOOL_CALLS]{_ARRAY}",
    "gpt-oss": (
        "<|channel|>commentary to=functions.read <|constrain|>json<|message|>"
        '{"path": "a é.txt", "n": 2}<|end|><|start|>assistant<|channel|>commentary to=functions.list '
        "<|constrain|>json<|message|>{}<|end|>"
    ),
    "gemma4": '<|tool_call>call:read{path:<|"|>a é.txt<|"|>,n:2}<tool_call|><|tool_call>call:list{}<tool_call|>',
    "functiongemma": (
        "<start_function_call>call:read{path:<escape>a é.txt<escape>,n:2}<end_function_call>"
        "<start_function_call>call:list{}<end_function_call>"
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "read", "parameters": '
        '{"path": "a é.txt", "n": 2}},\n    {"tool_call_id": "1", "tool_name": "list", "parameters": {}}\n]'
        "<|END_ACTION|>"
    ),
    "phi4_mini": f"<|tool_call|>{_ARRAY}<|/tool_call|>",
    "phi4_mini_json": f"functools{_ARRAY}",
    "granite": f"<|tool_call|>{_ARRAY}",
    "jamba": f"<tool_calls>{_ARRAY}</tool_calls>",
    "lfm2": f"<|tool_call_start|>{_PYTHON}<|tool_call_end|>",
    "llama3": (
        '<|python_tag|>{"name": "read", "parameters": {"path": "a é.txt", "n": 2}}; {"name": "list", "parameters": {}}'
    ),
    "pythonic": f"<|python_start|>{_PYTHON}<|python_end|>",
}


@dataclass(frozen=True)
class Reading:
    """A parser after an output, with the deltas it produced."""

    parser: OutputParser
    deltas: list[Delta]

    @property
    def calls(self) -> list[tuple[str, str]]:
        return [(call.name, call.arguments) for call in self.parser.message.tool_calls]


def parser_for(
    tokenizer: Tokenizer,
    calls: str | None,
    reasoning: str = "none",
    *,
    opened: bool = False,
    stop: Sequence[str] = (),
    tools: Sequence[Tool] = TOOLS,
) -> OutputParser:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    counter = itertools.count()
    known = None if calls is None else tool_format(calls)
    return ParserFactory(tokenizer, [end], reasoning_format(reasoning), known).build(
        tools=tools,
        reasoning_open=opened,
        stop=stop,
        call_id=lambda: f"call_{next(counter)}",
    )


def read(parser: OutputParser, chunks: Iterable[Sequence[int]]) -> Reading:
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk)]
    return Reading(parser, deltas + parser.finish())


def joined(deltas: Iterable[Delta]) -> Message:
    """Join deltas as a client does; checks that every call has a start, then arguments, then an end."""
    text, reasoning = "", ""
    calls: list[list[str]] = []
    ended = 0
    for delta in deltas:
        match delta:
            case TextDelta(piece):
                text += piece
            case ReasoningDelta(piece):
                reasoning += piece
            case ToolCallStart(index, call_id, name):
                assert index == len(calls) == ended
                calls.append([call_id, name, ""])
            case ToolCallArguments(index, fragment):
                assert index == ended == len(calls) - 1 and fragment
                calls[index][2] += fragment
            case ToolCallEnd(index):
                assert index == ended
                ended += 1
    assert ended == len(calls)
    return Message.from_json(
        {"role": "assistant", "content": text, "reasoning": reasoning or None, "tool_calls": calls}
    )


def library_reading(library: LibraryTemplate, output: list[int], prompt: list[int], tools: Sequence[Tool]) -> Any:
    """Parse an output with the parser of the `renderers` package, the oracle of the tests."""
    return library._renderer({}).parse_response(output, prompt_ids=prompt, tools=tool_dicts(tools))
