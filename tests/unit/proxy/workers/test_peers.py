"""Calls from worker to worker."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from proxy.workers.peers import Peers, Unreachable


async def test_a_call_loads_no_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    make = ssl.create_default_context

    def make_and_note(*arguments: Any, **named: Any) -> ssl.SSLContext:
        loaded.append(named)
        return make(*arguments, **named)

    monkeypatch.setattr(ssl, "create_default_context", make_and_note)
    with pytest.raises(Unreachable):
        await Peers(tmp_path, 0, 2).ask(1, "latest")
    assert not loaded
