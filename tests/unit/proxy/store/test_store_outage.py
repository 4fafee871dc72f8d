"""An outage of the database is told when it begins, at times while it lasts, and when it is over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from proxy.store.outage import Outage
from proxy.store.sql import writes
from proxy.store.store import Store
from tokengrove.errors import StoreUnavailable

Told = Callable[[], list[tuple[str, Mapping[str, Any]]]]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    """The events since the last call, each with its fields."""
    caplog.set_level(logging.INFO, "proxy.store")

    def since() -> list[tuple[str, Mapping[str, Any]]]:
        events = [(record.getMessage(), record.args or {}) for record in caplog.records]
        caplog.clear()
        return events  # type: ignore[return-value]

    return since


def test_an_outage_is_told_at_its_beginning_every_ten_seconds_and_at_its_end(told: Told) -> None:
    times = [100.0]
    outage = Outage("commits", lambda: times[-1])
    outage.over()
    for second in range(25):
        times.append(100.0 + second)
        outage.refused("its disk is full", "could not extend file")
    outage.over()
    outage.over()
    first, second, third, over = told()
    fields = {"fault": "its disk is full", "reason": "could not extend file"}
    assert first == ("the database refuses commits", {**fields, "refused": 1, "for_s": None})
    assert second[1] == {**fields, "refused": 11, "for_s": 10.0}
    assert third[1] == {**fields, "refused": 21, "for_s": 20.0}
    assert over == ("the database takes commits again", {"refused": 25, "after_s": 24.0})


async def test_refused_commits_and_reads_are_told_once_and_that_they_work_again(store: Store, told: Told) -> None:
    def full(_: Connection, __: Sequence[Any]) -> Sequence[Any]:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    def unreadable(_: Connection) -> None:
        raise OperationalError("SELECT", {}, Exception("disk I/O error"))

    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="its disk is full"):
            await store.database.write.submit(full, None)
        with pytest.raises(StoreUnavailable, match="its disk fails"):
            await store.database.read(unreadable)
    refused = [("the database refuses commits", "its disk is full"), ("the database refuses reads", "its disk fails")]
    assert [(event, fields["fault"]) for event, fields in told()] == refused
    await store.database.write.submit(writes.probe, None)
    await store.database.read(lambda connection: None)
    again = [(event, fields["refused"]) for event, fields in told()]
    assert again == [("the database takes commits again", 3), ("the database takes reads again", 3)]


async def test_notes_that_an_outage_refuses_have_no_lines_of_their_own(store: Store, told: Told) -> None:
    def full(_: Connection, __: Sequence[Any]) -> Sequence[Any]:
        raise OperationalError("INSERT", {}, Exception("database or disk is full"))

    for _ in range(3):
        store.database.write.note(full, None)
        with pytest.raises(StoreUnavailable, match="its disk is full"):
            await store.database.write.submit(full, None)
    assert [event for event, _ in told()] == ["the database refuses commits"]
