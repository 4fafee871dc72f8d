"""Messages of errors: whole, unless they quote something very long."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

import proxy
from tokengrove.errors import InvalidRequest, brief

PROXY = Path(proxy.__file__).parent


@pytest.mark.parametrize("length", [0, 1, 2900])
def test_a_message_is_whole(length: int) -> None:
    message = "x" * length
    assert InvalidRequest(message).message == message


def test_of_a_message_that_quotes_an_image_the_middle_is_left_out() -> None:
    error = InvalidRequest(f"'type' is {'data:image/png;base64,' + 'A' * 1_000_000!r}; this server accepts text")
    assert len(error.message) < 3100
    assert error.message.startswith("'type' is 'data:image/png;base64,AAA")
    assert error.message.endswith("AAA'; this server accepts text")
    assert "characters left out" in error.message
    assert str(error) == error.message


@pytest.mark.parametrize("character", ["a", "é", "😀", "\0", '"', "\ud800"])
def test_a_message_and_a_param_have_few_bytes_as_json_whatever_they_quote(character: str) -> None:
    error = InvalidRequest(character * 100_000, param=character * 100_000)
    told = json.dumps([error.message, error.param], ensure_ascii=False)
    assert len(told.encode(errors="replace")) < 3500


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = {"type": value}
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [("x", "'x'"), (None, "None"), (1.5, "1.5"), ({"b": 1, "a": [2]}, "{'a': [2], 'b': 1}"), ([[[[1]]]], "[[[...]]]")],
)
def test_a_small_value_is_shown_as_python_writes_it(value: object, shown: str) -> None:
    assert brief(value) == shown


@pytest.mark.parametrize(
    "value",
    [
        nested(5000),
        "x" * 10**6,
        ["x" * 1000] * 1000,
        dict.fromkeys(map(str, range(10**5)), "x" * 1000),
        {"x" * 10**6: 1},
    ],
    ids=["deep", "long", "many", "many keys", "long key"],
)
def test_of_a_large_value_the_beginning_is_shown(value: object) -> None:
    assert len(brief(value)) <= 310


def test_no_message_for_clients_quotes_a_value_without_a_bound() -> None:
    """`repr` of input recurses as deep as it is, and is as long."""
    found = [
        f"{path.relative_to(PROXY)}:{node.lineno}"
        for package in ("api", "protocols", "sessions", "turns")
        for path in sorted((PROXY / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FormattedValue) and node.conversion == ord("r")
    ]
    assert found == []
