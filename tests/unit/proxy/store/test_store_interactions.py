"""Interactions keep every field, their seq is the order of completion, and notes are written in the same queue."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest

from proxy.store.notes import note_fields, notes_of
from proxy.store.store import Store
from proxy.types import (
    Api,
    ImagePart,
    Message,
    PlacedImage,
    Role,
    SamplingParams,
    SessionRecord,
    Tool,
    ToolCall,
    ids_of,
)
from tokengrove.errors import InvalidRequest
from tokengrove.reasons import FinishReason, LogprobsOf, Reason, Status

IMAGE = ImagePart("5f" * 32, 3, 20, 10, "low")


def full(node: Any) -> Any:
    """An interaction in which no field has its default value."""
    return node(
        "resp_1",
        parent_id="chatcmpl-0",
        aligned=True,
        reason=Reason.CONTINUED,
        api=Api.RESPONSES,
        new_messages=(
            Message(
                Role.TOOL,
                "größe " * 300,
                tool_call_id="call_1",
                name="ls",
                images=(IMAGE,),
            ),
        ),
        output=Message(Role.ASSISTANT, "", (ToolCall("call_2", "bash", '{"a": 1}'),), reasoning="hm"),
        prefix_length=1_000,
        prompt_suffix=ids_of([0, 2**31 - 1]),
        output_ids=ids_of([9, 8, 7]),
        logprobs=array("f", [-0.1, -1e-30, 0.0]),
        versions=((1, 3), (2, 4)),
        finish_reason=FinishReason.STOP_STRING,
        sampling=SamplingParams(0.0, 0.9, 5, 0.1, 10, 0.1, 0.2, 1.1, ((5, -1.0),), 2**70, ("stop",), True),
        tools=(Tool("bash", "runs", {"type": "object"}, True),),
        template_options={"enable_thinking": False},
        model="model/name",
        stop_string="stop",
        reward=0.1,
        rewards={"format": 1.0},
        token_rewards=array("f", [0.0, 0.5, 1.0]),
        state_hash="state",
        purpose="title",
        agent="worker",
        trainable=False,
        spans=((0, 2),),
        request_hash="hash",
        error="none",
        dropped=("user", "half \ud800"),
        idempotency_key="key",
        request_id="step-7",
        grammar=True,
        has_logprobs=False,
        unmasked_logprobs=array("f", [-3.0, -1e-30, -0.5]),
        asked={"n": 2, "tool_choice": ["named", "f"], "echo": {"metadata": {"a": None}}},
        logprobs_of=LogprobsOf.SAMPLED,
        malformed_calls=3,
        cached_tokens=4,
        reasoning_tokens=2,
        created_at=1.5,
        first_token_at=1.75,
        completed_at=2.5,
        images=(PlacedImage("5f" * 32, 1000, 1, 20, 10, "low"),),
    )


async def test_every_field_of_an_interaction_comes_back(store: Store, session: SessionRecord, node: Any) -> None:
    stored = full(node)
    assert await store.turns.append(stored) == stored.seq == 0
    assert await store.recordings.load_interactions("task-0") == [stored]


async def test_notes_keep_their_names_in_the_database_and_a_usual_interaction_has_none(node: Any) -> None:
    assert list(notes_of(full(node)).items()) == [
        ("dropped", ["user", "half \ud800"]),
        ("idempotency_key", "key"),
        ("request_id", "step-7"),
        ("grammar", True),
        ("sampled", False),
        ("logprobs_of", "sampled"),
        ("malformed_calls", 3),
    ]
    assert notes_of(node("a")) == {}


async def test_a_restart_gives_equal_sessions_and_interactions(url: str, node: Any) -> None:
    store = Store.open(url)
    await store.starts.create_session(SessionRecord("task-0"))
    nodes = [full(node), node("b", seq=-1), node("c", status=Status.ABORTED)]
    for each in nodes:
        await store.turns.append(each)
    before = await store.keys.load_session("task-0")
    await store.close()
    store = Store.open(url)
    assert await store.recordings.load_interactions("task-0") == nodes
    assert await store.keys.load_session("task-0") == before
    assert await store.turns.append(node("d")) == 3
    await store.close()


async def test_concurrent_appends_get_each_seq_once_in_the_order_they_were_queued(store: Store, node: Any) -> None:
    for name in ("a", "b"):
        await store.starts.create_session(SessionRecord(name))
    nodes = [node(f"n{n}", session_id="ab"[n % 2]) for n in range(200)]
    seqs = await asyncio.gather(*map(store.turns.append, nodes))
    assert seqs[0::2] == seqs[1::2] == list(range(100))
    for name in ("a", "b"):
        assert [each.seq for each in await store.recordings.load_interactions(name)] == list(range(100))


async def test_failed_nodes_take_a_seq_too(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("a", status=Status.FAILED))
    assert await store.turns.append(node("b")) == 1


async def test_a_refused_append_leaves_no_gap(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("a"))
    with pytest.raises(InvalidRequest):
        await store.turns.append(node("a"))
    assert await store.turns.append(node("b")) == 1


async def test_interactions_are_loaded_after_a_seq_and_by_status(
    store: Store, session: SessionRecord, node: Any
) -> None:
    for n, status in enumerate((Status.COMPLETE, Status.FAILED, Status.COMPLETE, Status.ABORTED)):
        await store.turns.append(node(f"n{n}", status=status))

    async def loaded(**wanted: Any) -> list[int]:
        return [each.seq for each in await store.recordings.load_interactions("task-0", **wanted)]

    assert await loaded(after_seq=1) == [2, 3]
    assert await loaded(statuses={Status.COMPLETE}) == [0, 2]
    assert await loaded(after_seq=0, statuses=[Status.FAILED, Status.ABORTED]) == [1, 3]
    assert await loaded(statuses=()) == []


async def test_a_begun_call_is_on_record_until_its_interaction_is(
    store: Store, session: SessionRecord, node: Any
) -> None:
    for name in ("one", "three", "three"):
        store.turns.note_begun(name, "task-0", "h")
    store.turns.queue_notes()
    await store.turns.append(node("one"))
    await store.changes.set_rewards("task-0", {"one": {"trainable": True}})
    assert set(await store.news.load_begun("task-0")) == {"three"}


async def test_a_reply_is_unwritten_until_it_is_noted(store: Store, session: SessionRecord, node: Any) -> None:
    for name in ("one", "two"):
        await store.turns.append(node(name))
    await store.turns.append(node("three", status=Status.FAILED))
    store.turns.note_replied("one")
    store.turns.note_replied("nobody")
    store.turns.queue_notes()
    await store.changes.set_rewards("task-0", {"one": {"trainable": True}})
    assert await store.news.load_unreplied("task-0") == {"two"}


async def test_a_superseded_attempt_is_known_as_one(store: Store, session: SessionRecord, node: Any) -> None:
    await store.turns.append(node("one", status=Status.FAILED))
    store.turns.note_begun("two", "task-0", "h")  # its failure cannot be recorded
    for name in ("one", "two"):
        await store.turns.supersede(name)
    [loaded] = await store.recordings.load_interactions("task-0", statuses={Status.SUPERSEDED})
    assert loaded.id == "one"
    assert await store.news.load_begun("task-0") == {}


async def test_a_turn_whose_commit_was_done_unnoticed_is_not_superseded(
    store: Store, session: SessionRecord, node: Any
) -> None:
    await store.turns.append(node("one"))
    await store.turns.supersede("one")
    [loaded] = await store.recordings.load_interactions("task-0")
    assert loaded.status is Status.COMPLETE


async def test_an_append_moves_the_last_activity_of_its_session(
    store: Store, session: SessionRecord, node: Any
) -> None:
    await store.turns.append(node("one"))
    loaded = await store.keys.load_session("task-0")
    assert loaded is not None and loaded.updated_at > session.updated_at


async def test_an_append_is_committed_even_if_its_caller_is_cancelled(
    store: Store, session: SessionRecord, node: Any
) -> None:
    task = asyncio.ensure_future(store.turns.append(node("one")))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await store.changes.set_rewards("task-0", {"one": {"trainable": True}})
    assert len(await store.recordings.load_interactions("task-0")) == 1


def test_a_single_malformed_call_is_noted(node: Any) -> None:
    assert notes_of(node("a", malformed_calls=1)) == {"malformed_calls": 1}


def test_notes_of_an_older_server_mean_logprobs_by_the_rule_and_a_word_of_a_newer_one_is_kept() -> None:
    assert note_fields({})["logprobs_of"] is LogprobsOf.RULE
    assert note_fields({"logprobs_of": "tempered"})["logprobs_of"] == "tempered"
