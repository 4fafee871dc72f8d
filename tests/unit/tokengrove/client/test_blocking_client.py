"""The blocking client is what the asyncio client makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from supply import blocking_client


def test_the_blocking_client_is_the_asyncio_client_without_await() -> None:
    assert blocking_client.blocking_client() == blocking_client.WRITTEN.read_text(encoding="utf-8")


def test_a_change_of_the_asyncio_client_alone_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = tmp_path / "async_client.py"
    changed.write_text(blocking_client.SOURCE.read_text(encoding="utf-8").replace("limits=LIMITS", "limits=None"))
    monkeypatch.setattr(blocking_client, "SOURCE", changed)
    monkeypatch.setattr("sys.argv", ["blocking_client", "--check"])
    assert blocking_client.main() == 1
