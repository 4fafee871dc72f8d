"""The table of docs/monitoring.md has every event that a module tells, with its fields, and no other one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from proxy.telemetry.session_labels import LABELS

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "monitoring.md"


SOURCES = [path for package in ("proxy", "tokengrove") for path in (ROOT / package).rglob("*.py")]
_LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception", "log", "LogRecord", "_tell", "tell"})


@cache
def parsed() -> dict[Path, ast.Module]:
    """The modules of the packages that tell an event: only these write one of the names of `_LEVELS` behind a dot."""
    texts = {path: path.read_text() for path in SOURCES}
    speaking = re.compile(rf"\.\s*(?:{'|'.join(sorted(_LEVELS))})\b")
    return {path: ast.parse(text) for path, text in texts.items() if speaking.search(text)}


@cache
def told() -> dict[str, set[str]]:
    """The fields of each event in the code: what is said by a name, with a dictionary or with keywords."""
    found: dict[str, set[str]] = {}
    for module in parsed().values():
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for name, fields in _said_in(function):
                    found.setdefault(name, set()).update(fields)
    return found


def _said_in(function: ast.AST) -> Iterator[tuple[str, set[str]]]:
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LEVELS:
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            fields = _fields_of(call, assigned)
            if texts and "%" not in texts[0] and fields:
                yield texts[0], fields


def _fields_of(call: ast.Call, assigned: Mapping[str, ast.expr]) -> set[str]:
    """The names of the fields of a call. `ServerEvents` takes them as keywords, after the field `server`."""
    fields = {keyword.arg for keyword in call.keywords if keyword.arg not in (None, "exc_info")}
    for arg in call.args:
        given = arg.elts[0] if isinstance(arg, ast.Tuple) and arg.elts else arg
        given = assigned.get(given.id, given) if isinstance(given, ast.Name) else given
        if isinstance(given, ast.Dict):
            fields |= {key.value for key in given.keys if isinstance(key, ast.Constant)}
    of_server = any(part in ast.unparse(call.func) for part in ("events.", "self._tell"))
    of_server = of_server and not any(isinstance(arg, ast.Constant) and arg.value == "" for arg in call.args)
    return {str(name) for name in fields} | ({"server"} if of_server else set())


def documented() -> dict[str, set[str]]:
    """The fields of each event in the table."""
    table = PAGE.read_text().partition("| event | level | fields | when |")[2].partition("\n\n")[0]
    rows = [row.split("|") for row in table.strip().splitlines()[1:]]
    return {row[1].strip(" `"): set(re.findall(r"`(\w+)`", row[3])) for row in rows}


def test_the_table_has_the_events_and_fields_of_the_code() -> None:
    assert documented() == told()
    assert len(told()) > 8


def test_no_event_has_a_field_that_every_line_has() -> None:
    taken = {"time", "level", "logger", "event", "worker", "traceback"}
    assert {name: fields & taken for name, fields in told().items() if fields & taken} == {}


def test_every_line_that_names_a_session_names_its_training_run() -> None:
    named = []
    for path, module in parsed().items():
        for call in ast.walk(module):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _LEVELS:
                for fields in (arg for arg in call.args if isinstance(arg, ast.Dict)):
                    names = {key.value for key in fields.keys if isinstance(key, ast.Constant)}
                    spread = [ast.unparse(v) for k, v in zip(fields.keys, fields.values, strict=True) if k is None]
                    if "session" in names:
                        named.append(path.name)
                        assert any(text.endswith(".labels") for text in spread), f"{path}:{call.lineno}"
    assert {"turn_lines.py", "request_lines.py", "turns.py", "commits.py"} <= set(named)


def test_the_page_lists_the_labels_of_a_training_run() -> None:
    rows = PAGE.read_text().partition("| label | meaning |")[2].partition("\n\n")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", rows, re.M)) == LABELS
