"""Lark grammars of custom tools become regular expressions for the same texts, or are refused with the reason."""

from __future__ import annotations

import re

import pytest

from proxy.protocols.custom_tools import arguments_of, custom_tool, input_of
from proxy.protocols.lark import regex_of
from tokengrove.errors import UnsupportedParameter

PATCH = r"""
start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?

// what changes
hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
GRAMMARS = {
    PATCH: (
        [
            "*** Begin Patch\n*** Add File: a.py\n+x\n+\n*** End Patch\n",
            "*** Begin Patch\n*** Delete File: a\n*** End Patch",
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a.py\nx\n*** End Patch"],
    ),
    'start: A | b\nA: /x[\\/]y\\/z/\nb: "q"i~2..3': (["x/y/z", "qQ", "QQQ"], ["q", "qqqq", "x"]),
    'start: ["-"] DIGITS ("." DIGITS)*\nDIGITS: "0".."9"+': (["-1", "10.2.3"], ["-", "1.", "a"]),
    'start: "(*)\\n" /a.b/s': (["(*)\na\nb"], ["(*)\nab", "(\na b"]),
    'start: one\n  | two\none: "1"\ntwo: "2"': (["1", "2"], ["12", ""]),
}


@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_the_regular_expression_has_the_texts_of_the_grammar(grammar: str) -> None:
    pattern, (good, bad) = re.compile(regex_of(grammar)), GRAMMARS[grammar]
    assert [text for text in good if not pattern.fullmatch(text)] == []
    assert [text for text in bad if pattern.fullmatch(text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "'start' is recursive"),
        ("start: missing", "'missing' is not defined"),
        ('begin: "x"', "'start' is not defined"),
        ('start: "x"\n%ignore " "', "%ignore"),
        ("start: X\n%import common.NOTHING", "not supported"),
        ('start: "x" )', "unexpected"),
        ('start: ("x"', "not closed"),
        ('start: "x"\nstart: "y"', "twice"),
        ("start: @", "not supported"),
        ("nothing", "no rule"),
        ("", "'start' is not defined"),
    ],
)
def test_a_grammar_without_a_regular_expression_is_refused_with_the_reason(grammar: str, reason: str) -> None:
    with pytest.raises(UnsupportedParameter, match=re.escape(reason)) as caught:
        wanted = {"type": "grammar", "syntax": "lark", "definition": grammar}
        custom_tool({"type": "custom", "name": "x", "format": wanted}, "tools[0]")
    assert caught.value.param == "tools[0].format.definition"


def test_the_model_reads_the_grammar_in_the_description_and_not_in_the_schema() -> None:
    wanted = {"type": "grammar", "syntax": "regex", "definition": "a+"}
    tool = custom_tool({"type": "custom", "name": "x", "description": "d", "format": wanted}, "tools[0]")
    assert tool.description == "d\n\nThe input must match this regular expression:\na+"
    assert "pattern" not in tool.parameters["properties"]["input"]
    assert tool.held_schema["properties"]["input"]["pattern"] == "^(?:a+)$"


@pytest.mark.parametrize("text", ["", "a", 'x = "1"\n', "\u20ac\\"])
def test_an_input_becomes_arguments_and_back(text: str) -> None:
    assert input_of(arguments_of(text)) == text


@pytest.mark.parametrize("arguments", ["{", '{"code": "x"}', '{"input": 5}', "[]", '{"input": "x", "more": 1}'])
def test_arguments_without_an_input_are_the_input_as_written(arguments: str) -> None:
    assert input_of(arguments) == arguments
