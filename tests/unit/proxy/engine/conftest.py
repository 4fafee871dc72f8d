"""Requests that have lost several servers are submitted again at once."""

from __future__ import annotations

import pytest

from proxy.engine import gate


@pytest.fixture(autouse=True)
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "_WAIT_S", 0.0)
