"""What a server has said, as its fields and as its lines."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.telemetry.log_lines import JsonLines, PrettyLines


def fields_of(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """The fields of each line of an event, in order, without those that are None."""
    found = [record.args for record in caplog.records if record.msg == event and isinstance(record.args, dict)]
    return [{name: value for name, value in fields.items() if value is not None} for fields in found]


def lines_of(caplog: pytest.LogCaptureFixture, *, logger: str = "", form: str = "pretty") -> list[str]:
    """The lines of what loggers of this prefix have said, as `form` writes them."""
    lines = JsonLines() if form == "json" else PrettyLines(colour=False)
    return [lines.format(record) for record in caplog.records if record.name.startswith(logger)]
