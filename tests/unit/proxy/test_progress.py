"""The steps of a start: a line when each begins, and one with its duration if that is long."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from proxy import progress


def clock(monkeypatch: pytest.MonkeyPatch, *times_s: float) -> None:
    times = iter(times_s)
    monkeypatch.setattr(time, "monotonic", lambda: next(times))


def test_a_long_step_says_how_long_it_took(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 10.0, 13.44, 20.0, 20.9)
    with caplog.at_level(logging.INFO, "proxy.start"):
        with progress.doing("loading much"):
            assert caplog.messages == ["loading much"]
        with progress.doing("loading little"):
            pass
    assert caplog.messages == ["loading much", "loading much took 3.4 s", "loading little"]


def test_a_step_that_fails_says_no_duration(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 10.0, 20.0)
    with caplog.at_level(logging.INFO, "proxy.start"), pytest.raises(ValueError), progress.doing("loading"):
        raise ValueError
    assert caplog.messages == ["loading"]


def test_a_step_tells_how_far_it_is_until_it_ends(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_EVERY_S", 0.0)
    told = threading.Event()
    counts = iter(range(1_000_000))

    def so_far() -> str:
        count = next(counts)
        if count == 2:
            told.set()
        return f"{count} files"

    with caplog.at_level(logging.INFO, "proxy.start"), progress.doing("fetching", so_far):
        assert told.wait(60)
    assert caplog.messages[:3] == ["fetching", "fetching: 0 files", "fetching: 1 files"]
    assert "tokengrove-progress" not in {thread.name for thread in threading.enumerate()}
