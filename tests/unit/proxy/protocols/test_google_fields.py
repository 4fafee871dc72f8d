"""Every field of the google-genai SDK is in exactly one row of a table, so a new SDK field or part fails here first."""

from __future__ import annotations

import re

import pytest
from google.genai import types

from proxy.protocols.google import contents, protocol, tools
from proxy.protocols.google.names import camel

# Fields of the SDK that it never sends to Google's API for developers, or that steer the SDK itself.
OF_THE_SDK = frozenset(
    {
        *("httpOptions", "shouldReturnHttpResponse", "automaticFunctionCalling", "automaticContinuation"),
        *("modelArmorConfig", "generationOutputConfig"),
    }
)
CONFIG = (protocol.CONFIG, protocol.IGNORED_CONFIG, protocol.REFUSED_CONFIG)
BODY = (protocol.HONOURED, protocol.IGNORED, protocol.REFUSED)
TABLES = {
    "Part": (contents.PARSED_PARTS, contents.REFUSED_PARTS, contents.MODIFIERS, contents.IGNORED_MODIFIERS),
    "Tool": (frozenset({tools.FUNCTIONS}), tools.HOSTED_TOOLS, tools.REFUSED_TOOLS),
    "FunctionDeclaration": (tools.DECLARED, tools.IGNORED_DECLARED),
    "ToolConfig": (tools.CONFIG, tools.IGNORED_CONFIG),
    "FunctionCallingConfig": (tools.CHOICE, tools.IGNORED_CHOICE),
    "FunctionCall": (contents.CALL, contents.REFUSED_CALL, contents.IGNORED_CALL),
    "FunctionResponse": (contents.RESULT, contents.IGNORED_RESULT),
    "ThinkingConfig": (protocol.THINKING,),
    "GenerationConfig": CONFIG,
    "GenerateContentConfig": (*CONFIG, *BODY, OF_THE_SDK),
}


@pytest.mark.parametrize("name", TABLES)
def test_each_field_of_the_sdk_is_in_exactly_one_row(name: str) -> None:
    fields = {camel(field) for field in getattr(types, name).model_fields}
    assert fields
    assert {field: sum(field in row for row in TABLES[name]) for field in fields} == dict.fromkeys(fields, 1)


def test_the_modes_of_function_calling_are_those_of_the_sdk() -> None:
    assert {mode.value for mode in types.FunctionCallingConfigMode} == tools._MODES.keys()


def test_the_table_at_the_top_of_the_module_names_every_field() -> None:
    words = set(re.findall(r"\w+", protocol.__doc__ or ""))
    rows = frozenset().union(*CONFIG, *BODY, protocol.THINKING, tools.CHOICE, tools.CONFIG)
    assert rows - words == set()
