"""A server in a thread: it starts in time, or says that it did not and leaves nothing behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from proxy.errors import ConfigurationError
from proxy.serving import server
from proxy.settings import Settings


def test_a_start_that_takes_too_long_is_said_and_its_thread_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_START_TIMEOUT_S", 0.0)
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 'late.db'}")
    with pytest.raises(ConfigurationError, match="did not start within 0 s"), server.serving(settings):
        pass
    assert "tokengrove-server" not in {thread.name for thread in threading.enumerate()}
