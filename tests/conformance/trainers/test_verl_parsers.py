"""verl's own tool parsers and the server's, under the same names, find the same calls in the same tokens."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.conformance.packages import package
from tokengrove.client import Client

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
DSML = "\uff5cDSML\uff5c"
CALLS = [("add", {"a": 1, "s": "x y"}), ("mul", {})]
OUTPUTS = {
    "hermes": (
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "x y"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "mul", "arguments": {}}\n</tool_call>'
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nx y\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=mul>\n</function>\n</tool_call>"
    ),
    "glm": (
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n"
        "<arg_value>x y</arg_value>\n</tool_call>\n<tool_call>mul\n</tool_call>"
    ),
    "seed": (
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=s>x y</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=mul>\n</function>\n</seed:tool_call>"
    ),
    "minimax": (
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="s">x y</parameter>\n</invoke>\n<invoke name="mul">\n</invoke>\n</minimax:tool_call>'
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        '{"a": 1, "s": "x y"}<|tool_call_end|><|tool_call_begin|>functions.mul:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "deepseek_v4": (
        f'<{DSML}tool_calls>\n<{DSML}invoke name="add">\n<{DSML}parameter name="a" string="false">1</{DSML}parameter>\n'
        f'<{DSML}parameter name="s" string="true">x y</{DSML}parameter>\n</{DSML}invoke>\n<{DSML}invoke name="mul">\n'
        f"</{DSML}invoke>\n</{DSML}tool_calls>"
    ),
    "gemma4": '<|tool_call>call:add{a:1,s:<|"|>x y<|"|>}<tool_call|><|tool_call>call:mul{}<tool_call|>',
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "s": "x y"}<|call|>'
    ),
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {"type": "object", "properties": properties, "required": []},
        },
    }
    for name, properties in {"add": {"a": {"type": "integer"}, "s": {"type": "string"}}, "mul": {}}.items()
]


class Decoder:
    """What verl's parsers need of a tokenizer."""

    pad_token = "<|endoftext|>"
    all_special_tokens: tuple[str, ...] = ()

    def __init__(self, client: Client) -> None:
        self._client = client

    def decode(self, ids: list[int], **_: object) -> str:
        return self._client.detokenize(ids)

    def convert_tokens_to_ids(self, _: str) -> int:
        return 0


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_servers_parser_finds_the_calls_that_verls_finds(url: str, name: str) -> None:
    for module in ("cachetools", "fastapi", "uvicorn"):
        package(module)  # verl's package of loops imports these
    parsers, schemas = package("verl.experimental.agent_loop.tool_parser"), package("verl.tools.schemas")
    tools = [schemas.OpenAIFunctionToolSchema.model_validate(tool) for tool in TOOLS]
    with Client(url) as client:
        ids = client.tokenize(OUTPUTS[name])
        parser = parsers.ToolParser.get_tool_parser(name, Decoder(client))
        _, found = asyncio.run(parser.extract_tool_calls(ids, tools))
        more = {"reasoning_parser": "gpt-oss"} if name == "gpt-oss" else {}
        message = client.parse(ids, tools=TOOLS, tool_parser=name, **more)
    calls = [call["function"] for call in message["tool_calls"]]
    theirs = [(call.name, json.loads(call.arguments)) for call in found]
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == theirs
    assert theirs == CALLS[: len(theirs)] and theirs
