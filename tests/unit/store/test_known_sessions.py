"""Ids of sessions in memory exclude a session only while all ids are known."""

from __future__ import annotations

import pytest

from proxy.store import known_sessions
from proxy.store.known_sessions import KnownSessions


def test_a_session_is_excluded_until_it_is_added() -> None:
    known = KnownSessions({"a"})
    assert known.exclude("b") and not known.exclude("a")
    known.add("b")
    assert not known.exclude("b")


def test_nothing_is_excluded_if_others_may_add_sessions() -> None:
    known = KnownSessions(None)
    known.add("a")
    assert not known.exclude("b")


def test_nothing_is_excluded_once_there_are_too_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "MAX_KNOWN", 2)
    known = KnownSessions({"a", "b"})
    assert known.exclude("c")
    known.add("c")
    assert not known.exclude("d")
    assert not KnownSessions({"a", "b", "c"}).exclude("d")


def test_an_id_that_fills_the_memory_to_its_limit_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "MAX_KNOWN", 2)
    known = KnownSessions({"a"})
    known.add("b")
    assert known.exclude("c")
