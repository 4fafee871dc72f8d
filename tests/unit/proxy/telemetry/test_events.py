"""Every event of the log has its own fields, and lines of a session name its training run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from proxy.telemetry.session_labels import LABELS
from supply.log_events import LEVELS, events, parsed

ROOT = Path(__file__).resolve().parents[4]
PAGE = ROOT / "docs" / "monitoring.md"


def test_the_events_are_found_with_their_levels_and_fields() -> None:
    assert len(events()) > 50
    assert events()["crash"].levels == ["critical", "error"] and not events()["turn"].levels
    assert {"session", "request_id", "trace_id"} <= set(events()["turn"].fields)
    assert events()["engine server left"].fields == ["server"]


def test_no_event_has_a_field_that_every_line_has() -> None:
    taken = {"time", "level", "logger", "event", "worker", "traceback"}
    found = {name: taken.intersection(event.fields) for name, event in events().items()}
    assert {name: fields for name, fields in found.items() if fields} == {}


def test_every_line_that_names_a_session_names_its_training_run() -> None:
    named = []
    for path, module in parsed().items():
        for call in ast.walk(module):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS:
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
