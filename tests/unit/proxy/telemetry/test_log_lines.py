"""Every record becomes one line that a program can read and a client cannot forge."""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.telemetry.log_lines import JsonLines, PrettyLines

NASTY = ["a\nforged", "a\r\x00\x1b[31m", 'a" status=200', "a\u2028b\u0085", "\udcff", "x" * 5000, "a b", "ä", ""]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def record(message: str, *args: Any, name: str = "proxy.turns", **more: Any) -> logging.LogRecord:
    made = logging.LogRecord(name, logging.WARNING, __file__, 1, message, args, more.get("exc_info"))
    made.created = 1795341845.678
    return made


def raised(message: str) -> Any:
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


def test_a_json_line_has_time_level_logger_event_and_fields() -> None:
    line = JsonLines().format(record("turn", {"session": "s", "tokens": 3, "left": True, "none": None, "s": 0.1234567}))
    assert json.loads(line) == {
        "time": "2026-11-22T10:04:05.678Z",
        "level": "warning",
        "logger": "proxy.turns",
        "event": "turn",
        **{"session": "s", "tokens": 3, "left": True, "s": 0.123457},
    }


def test_a_pretty_line_is_made_for_reading() -> None:
    told = {"session": "a/b", "text": "two words", "ok": True, "n": None, "s": 1.5, "empty": ""}
    line = PrettyLines(colour=False).format(record("turn", told))
    assert line == '2026-11-22T10:04:05.678Z warning turn session=a/b text="two words" ok=true s=1.5 empty=""'
    assert "\x1b[33mwarning" in PrettyLines(colour=True).format(record("turn", told))


def test_a_sentence_shows_its_fields_and_keeps_them_for_programs() -> None:
    said = record("server %(server)s is lost after %(s)g s", {"server": "http://u:p@h:1", "s": 2.0, "why": "gone"})
    assert json.loads(JsonLines().format(said))["event"] == "server http://...@h:1 is lost after 2 s"
    assert json.loads(JsonLines().format(said))["server"] == "http://...@h:1"
    assert PrettyLines(colour=False).format(said).endswith("server http://...@h:1 is lost after 2 s why=gone")
    assert json.loads(JsonLines().format(record("plain %s of %d", "text", 2)))["event"] == "plain text of 2"
    assert PrettyLines(colour=False).format(record("hi", name="httpx")).endswith("hi logger=httpx")


@pytest.mark.parametrize("text", NASTY)
@pytest.mark.parametrize("lines", [JsonLines(), PrettyLines(colour=False)])
def test_no_text_begins_a_line_or_steers_a_terminal(text: str, lines: logging.Formatter) -> None:
    for said in (
        record("turn", {"session": text, "also": [text]}),
        record("it is %s", text),
        record("%(t)s", {"t": text}),
    ):
        line = lines.format(said)
        assert line.isprintable() and len(line) < 2000
    head, *rest = lines.format(record("turn", {"session": text}, exc_info=raised(text))).split("\n")
    assert head.isprintable() and all(line.isprintable() and line.startswith("    | ") for line in rest)


@given(st.dictionaries(st.text(max_size=8), ANYTHING, min_size=1), st.text())
@pytest.mark.wide
def test_whatever_is_said_is_one_line(fields: dict[str, Any], message: str) -> None:
    for args in ((fields,), (message,), ()):
        said = json.loads(JsonLines().format(record(message, *args)))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", said["time"]) and isinstance(said["event"], str)
        assert PrettyLines(colour=False).format(record(message, *args)).isprintable()


def test_a_traceback_is_a_field_and_its_end_is_kept() -> None:
    said = json.loads(JsonLines().format(record("crash", exc_info=raised("x" * 100_000 + " the end"))))
    assert said["traceback"].startswith("...") and said["traceback"].endswith("x the end")
    quoting = JsonLines().format(record("crash", exc_info=raised(f"cannot read {'a text of a message'!r}")))
    assert "ValueError: cannot read '...'" in quoting and "of a message" not in quoting
    assert "Traceback" in json.loads(JsonLines().format(record("crash", exc_info=raised("why"))))["traceback"]


@pytest.mark.parametrize(
    "secret",
    [
        *("/s~DvY3Gk4xQwEr5tYuIoPaSd/v1", "http://h/~p4ss+word/v1"),
        *("sk-abcdefghijklmnopqrstuvwx", "postgresql://user:p4ss@host/db"),
    ],
)
def test_what_looks_like_a_secret_is_masked_wherever_it_comes_from(secret: str) -> None:
    for said in (
        record("turn", {"x": secret}),
        record(f"at {secret}"),
        record("crash", exc_info=raised(f"in {secret}")),
    ):
        for lines in (JsonLines(), PrettyLines(colour=False)):
            line = lines.format(said)
            assert "..." in line and not re.search("DvY3Gk|abcdefgh|p4ss", line)


def test_the_number_of_a_worker_is_in_each_of_its_lines() -> None:
    for lines in (JsonLines(), PrettyLines(colour=False)):
        lines.worker = 1
        assert re.search('worker(=|": )1', lines.format(record("turn", {"a": 1})))
