"""The events of the log: every constant text that a module tells together with fields, read from the source.

Sentences, which contain values, are no events.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception", "log", "LogRecord", "_tell", "tell"})
"""The names of the functions that tell an event."""


@dataclass
class Event:
    """The levels and the fields of an event, in the order of the source. A level that is computed is no member."""

    levels: list[str] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)

    def add(self, level: str | None, fields: list[str]) -> None:
        self.levels += [level] if level is not None and level not in self.levels else []
        self.fields += [name for name in fields if name not in self.fields]


@cache
def parsed() -> dict[Path, ast.Module]:
    """The modules of the packages that tell an event: only these write one of the names of `LEVELS` behind a dot."""
    sources = [path for package in ("proxy", "tokengrove") for path in sorted((ROOT / package).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    speaking = re.compile(rf"\.\s*(?:{'|'.join(sorted(LEVELS))})\b")
    return {path: ast.parse(text) for path, text in texts.items() if speaking.search(text)}


@cache
def events() -> dict[str, Event]:
    """Every event by its name: what is said by a name, with a dictionary or with keywords."""
    found: dict[str, Event] = {}
    for module in parsed().values():
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                for name, level, fields in _said_in(function):
                    found.setdefault(name, Event()).add(level, fields)
    return dict(sorted(found.items()))


def _said_in(function: ast.AST) -> Iterator[tuple[str, str | None, list[str]]]:
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for call in ast.walk(function):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS:
            texts = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            fields = _fields_of(call, assigned)
            if texts and "%" not in texts[0] and fields:
                yield texts[0], _level_of(call, call.func.attr), fields


def _level_of(call: ast.Call, method: str) -> str | None:
    """The level that the method has, or the constant that it is given; None if it is computed."""
    given = next((arg.attr for arg in call.args if isinstance(arg, ast.Attribute) and arg.attr.isupper()), None)
    if method in ("log", "LogRecord", "_tell", "tell"):
        return given.lower() if given else None
    return "error" if method == "exception" else method


def _fields_of(call: ast.Call, assigned: Mapping[str, ast.expr]) -> list[str]:
    """The names of the fields of a call. `ServerEvents` takes them as keywords, after the field `server`."""
    of_server = any(part in ast.unparse(call.func) for part in ("events.", "self._tell"))
    of_server = of_server and not any(isinstance(arg, ast.Constant) and arg.value == "" for arg in call.args)
    fields = ["server"] if of_server else []
    fields += [keyword.arg for keyword in call.keywords if keyword.arg not in (None, "exc_info")]
    for arg in call.args:
        given = arg.elts[0] if isinstance(arg, ast.Tuple) and arg.elts else arg
        given = assigned.get(given.id, given) if isinstance(given, ast.Name) else given
        if isinstance(given, ast.Dict):
            fields += [str(key.value) for key in given.keys if isinstance(key, ast.Constant)]
    return fields
