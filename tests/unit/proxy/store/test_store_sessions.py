"""Sessions, rewards and returns are read back as written. Errors name the wrong field."""

from __future__ import annotations

import asyncio
import math
from array import array
from dataclasses import replace
from typing import Any

import pytest

from proxy.store.session_query import SessionQuery
from proxy.store.sql import reads
from proxy.store.sql.checksums import OF_STARTS
from proxy.store.store import Store
from proxy.types import Lineage, SessionRecord
from tests.databases import execute
from tests.wide import CROSSED
from tokengrove.errors import InvalidRequest, NotFound, SessionNotFound
from tokengrove.options.session import Credit, Outcome, SessionStatus
from tokengrove.reasons import Evidence, Segment, Status

FULL = SessionRecord(
    session_id="a/b~c",
    task_id="é task",
    group_id="group",
    status=SessionStatus.ENDED,
    api_key_hash="1" * 64,
    control_key_hash="2" * 64,
    path_key_hash="3" * 64,
    sampling={"temperature": 0.5},
    limits={"max_turns": 3},
    metadata={"nested": {"list": [1, None, "x" * 2000]}},
    discount=0.9,
    credit=Credit.LINEAR,
    outcome=Outcome.TIMEOUT,
    exit_reason="too slow",
    finished=False,
    metrics={"score": 1.5},
    weight_version=2**40,
    created_at=1.25,
    updated_at=2.25,
    ended_at=3.25,
)


async def test_every_field_of_a_session_comes_back(store: Store) -> None:
    await store.starts.create_session(FULL)
    assert await store.keys.load_session(FULL.session_id) == FULL


async def test_a_session_that_exists_is_refused(store: Store) -> None:
    await store.starts.create_session(FULL)
    with pytest.raises(InvalidRequest) as caught:
        await store.starts.create_session(replace(FULL, task_id="other"))
    assert caught.value.param == "session_id"
    assert await store.keys.load_session(FULL.session_id) == FULL


async def test_of_many_equal_creations_exactly_one_succeeds(store: Store) -> None:
    done = await asyncio.gather(*(store.starts.create_session(FULL) for _ in range(20)), return_exceptions=True)
    assert done.count(None) == 1
    assert all(isinstance(error, InvalidRequest) for error in done if error is not None)


async def test_an_unknown_session_is_none(store: Store) -> None:
    assert await store.keys.load_session("nobody") is None


async def test_an_updated_session_is_read_back_with_what_its_start_set(store: Store, session: SessionRecord) -> None:
    await store.changes.update_session(replace(FULL, session_id=session.session_id))
    started = {name: getattr(session, name) for name in OF_STARTS - {"validation"}}
    assert await store.keys.load_session(session.session_id) == replace(FULL, **started)


async def test_an_unknown_session_cannot_be_changed(store: Store, node: Any) -> None:
    for change in (
        store.changes.update_session(FULL),
        store.changes.end_session(FULL),
        store.changes.set_rewards("x", {}),
    ):
        with pytest.raises(SessionNotFound):
            await change
    with pytest.raises(SessionNotFound):
        await store.turns.append(node(session_id="nobody"))


async def returns_of(store: Store) -> dict[tuple[str, float, Credit], float]:
    return await store.database.read(reads.load_returns, "task-0")


async def test_ending_seals_and_writes_returns_together(store: Store, node: Any) -> None:
    record = SessionRecord("task-0", discount=0.9)
    await store.starts.create_session(record)
    await store.turns.append(node("one"))
    await store.turns.append(node("two", parent_id="one"))
    await store.turns.append(node("failed", parent_id="two", status=Status.FAILED))
    ended = replace(record, status=SessionStatus.ENDED, ended_at=5.0)
    await store.changes.end_session(ended, rewards={"two": {"reward": 1.0}})
    assert await store.keys.load_session("task-0") == ended
    assert await returns_of(store) == {("one", 0.9, Credit.TREE): 0.9, ("two", 0.9, Credit.TREE): 1.0}


@pytest.mark.parametrize("late", ["before", "after"])
async def test_a_turn_that_is_queued_with_the_end_is_in_its_returns(
    store: Store, session: SessionRecord, node: Any, late: str
) -> None:
    await store.turns.append(node("one"))
    ended = replace(session, status=SessionStatus.ENDED, ended_at=5.0)
    changes = [
        store.turns.append(node("two", parent_id="one", reward=1.0)),
        store.changes.end_session(ended, rewards={"one": {"reward": 2.0}}),
    ]
    await asyncio.gather(*(changes if late == "before" else reversed(changes)))
    assert await returns_of(store) == {("one", 1.0, Credit.TREE): 3.0, ("two", 1.0, Credit.TREE): 1.0}


@pytest.mark.parametrize("credit", [Credit.LINEAR, Credit.LINEAGE])
async def test_a_late_turn_and_a_late_reward_change_the_returns_of_their_session_only(
    store: Store, node: Any, credit: Credit
) -> None:
    records = [SessionRecord(name, discount=0.5, credit=credit) for name in ("task-0", "other")]
    for record in records:
        await store.starts.create_session(record)
        await store.turns.append(node(f"{record.session_id}-one", session_id=record.session_id))
    for record in records:
        await store.changes.end_session(replace(record, status=SessionStatus.ENDED, ended_at=5.0))
    other = await store.database.read(reads.load_returns, "other")
    went_on = Lineage(("task-0-one",), Segment.COMPACTION, Evidence.SUMMARY)
    await store.turns.append(node("task-0-two", lineage=went_on))
    await store.changes.set_rewards("task-0", {"task-0-two": {"reward": 1.0}})
    assert await returns_of(store) == {("task-0-one", 0.5, credit): 0.5, ("task-0-two", 0.5, credit): 1.0}
    assert await store.database.read(reads.load_returns, "other") == other == {("other-one", 0.5, credit): 0.0}


async def test_a_live_session_has_no_returns(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("one"))
    await store.changes.set_rewards(session.session_id, {"one": {"reward": 1.0}})
    assert await returns_of(store) == {}


async def test_sessions_keep_the_order_in_which_they_ended(store: Store, database_url: str) -> None:
    for name in "abc":
        await store.starts.create_session(SessionRecord(name))
    for name in "cabc":
        await store.changes.end_session(SessionRecord(name, status=SessionStatus.ENDED))
    rows = execute(database_url, "SELECT session_id, ended_order FROM sessions ORDER BY ended_order")
    assert rows == [("c", 1), ("a", 2), ("b", 3)]


async def test_an_end_with_a_reward_of_no_interaction_changes_nothing(store: Store, session: SessionRecord) -> None:
    with pytest.raises(NotFound):
        await store.changes.end_session(
            replace(session, status=SessionStatus.ENDED), rewards={"nobody": {"reward": 1.0}}
        )
    assert await store.keys.load_session(session.session_id) == session


async def test_rewards_are_set_one_by_one_and_stay_raw(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("one"))
    await store.changes.set_rewards("task-0", {"one": {"reward": 0.1}})
    await store.changes.set_rewards("task-0", {"one": {"rewards": {"format": 0.2}}})
    await store.changes.set_rewards("task-0", {"one": {"token_rewards": array("f", [0.5, 1.0])}})
    [loaded] = await store.recordings.load_interactions("task-0")
    assert (loaded.reward, loaded.rewards, loaded.token_rewards) == (0.1, {"format": 0.2}, array("f", [0.5, 1.0]))
    await store.changes.set_rewards("task-0", {"one": {"reward": None, "token_rewards": None}})
    [loaded] = await store.recordings.load_interactions("task-0")
    assert (loaded.reward, loaded.rewards, loaded.token_rewards) == (None, {"format": 0.2}, None)


async def test_rewards_with_one_unknown_interaction_set_none(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("one"))
    with pytest.raises(NotFound):
        await store.changes.set_rewards("task-0", {"one": {"reward": 1.0}, "two": {"reward": 1.0}})
    [loaded] = await store.recordings.load_interactions("task-0")
    assert loaded.reward is None


async def test_an_interaction_of_another_session_is_not_rewarded(
    store: Store, session: SessionRecord, node: Any
) -> None:
    await store.turns.append(node("one"))
    await store.starts.create_session(FULL)
    with pytest.raises(NotFound):
        await store.changes.set_rewards(FULL.session_id, {"one": {"reward": 1.0}})


@CROSSED
@pytest.mark.parametrize(
    "change", [{"reward": math.nan}, {"rewards": {"a": math.inf}}, {"token_rewards": array("f", [math.nan, 0])}]
)
async def test_a_reward_that_is_not_finite_is_refused(
    store: Store, session: SessionRecord, node: Any, change: Any
) -> None:
    await store.turns.append(node("one"))
    with pytest.raises(InvalidRequest):
        await store.changes.set_rewards("task-0", {"one": change})


async def test_a_mark_is_read_back(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("one"))
    await store.changes.set_rewards("task-0", {"one": {"trainable": False, "spans": ((0, 1), (1, 2))}})
    [loaded] = await store.recordings.load_interactions("task-0")
    assert (loaded.trainable, loaded.spans) == (False, ((0, 1), (1, 2)))
    with pytest.raises(NotFound):
        await store.changes.set_rewards("task-0", {"two": {"trainable": True, "spans": ()}})


async def test_the_newest_live_session_of_a_key_is_found_before_the_newest(store: Store) -> None:
    for name, status in (("old", "active"), ("live", "active"), ("ended", "ended")):
        await store.starts.create_session(SessionRecord(name, api_key_hash="k", status=SessionStatus(status)))
    found = (await store.keys.find_key("k")).record
    assert found is not None and found.session_id == "live"
    for name in ("old", "live"):
        await store.changes.update_session(SessionRecord(name, api_key_hash="k", status=SessionStatus.EXPIRED))
    found = (await store.keys.find_key("k")).record
    assert found is not None and found.session_id == "ended"
    assert (await store.keys.find_key("other")).record is None


async def test_sessions_are_found_by_each_filter(store: Store) -> None:
    await store.starts.create_session(SessionRecord("a", task_id="t", group_id="g"))
    ended = SessionRecord("b", task_id="t", status=SessionStatus.ENDED, outcome=Outcome.FINISHED, ended_at=10.0)
    await store.starts.create_session(ended)
    await store.starts.create_session(
        replace(ended, session_id="c", task_id="u", outcome=Outcome.FAILED, ended_at=20.0)
    )

    async def found(**wanted: Any) -> str:
        return "".join(record.session_id for record in await store.recordings.find_sessions(SessionQuery(**wanted)))

    assert await found() == "abc"
    assert await found(task_id="t") == "ab"
    assert await found(group_id="g") == "a"
    assert await found(status=SessionStatus.ENDED) == "bc"
    assert await found(outcome=Outcome.FAILED) == "c"
    assert await found(since=15.0) == "ac"
    assert await found(session_ids=["c", "a", "nobody"]) == "ac"
    assert await found(session_ids=[]) == ""
    assert await found(task_id="t", status=SessionStatus.ENDED) == "b"
    assert await store.starts.count_sessions("t") == 2


async def test_pages_of_sessions_meet_without_gap_or_overlap(store: Store) -> None:
    names = [f"s{n}" for n in range(7)]
    for name in names:
        await store.starts.create_session(SessionRecord(name))
    seen: list[str] = []
    while page := await store.recordings.find_sessions(SessionQuery(limit=3, after=seen[-1] if seen else None)):
        seen += [record.session_id for record in page]
    assert seen == names


async def test_an_unknown_cursor_and_too_many_ids_are_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await store.recordings.find_sessions(SessionQuery(after="nobody"))
    assert caught.value.param == "cursor"
    with pytest.raises(InvalidRequest):
        await store.recordings.find_sessions(SessionQuery(session_ids=[str(n) for n in range(10_001)]))


async def test_the_end_of_a_session_frees_its_key_for_a_start_that_is_queued_behind_it(store: Store) -> None:
    record = SessionRecord("one", api_key_hash="17")
    await store.starts.create_session(record, chosen_key=True)
    ended = asyncio.ensure_future(store.changes.end_session(replace(record, status=SessionStatus.ENDED, ended_at=1.0)))
    await asyncio.sleep(0)
    await store.starts.create_session(SessionRecord("two", api_key_hash="17"), chosen_key=True)
    assert await ended
