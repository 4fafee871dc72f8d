"""The bytes of all bodies that a server holds at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from proxy.api import body_budget
from proxy.api.bodies import Bodies, Upload
from proxy.api.body_budget import FREE
from proxy.resources.memory import FreedMemory
from proxy.settings import Settings
from tokengrove.errors import TooManyRequests

MIB = 2**20
LONGEST = 4 * MIB

Passes = Callable[[], Awaitable[None]]


class Client:
    """An upload by hand: `send` gives the server the next bytes, and returns once it asks for more or has all."""

    def __init__(self, bodies: Bodies, owner: str, length: int | None = None) -> None:
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._asked = asyncio.Event()
        self.leave = asyncio.Event()
        scope = {"type": "http", "path_params": {"session": owner}, "headers": []}
        headers = {b"content-type": "application/json"}
        if length is not None:
            headers[b"content-length"] = str(length)
        self.task = asyncio.create_task(self._request(bodies.upload(scope, headers, self._receive)))

    async def _request(self, upload: Upload) -> int:
        with upload:
            size = len(await upload.read())
            self._asked.set()
            await self.leave.wait()
            return size

    async def _receive(self) -> dict[str, Any]:
        self._asked.set()
        return await self._messages.get()

    @property
    def unread(self) -> int:
        return self._messages.qsize()

    def put(self, size: int, *, more: bool = True) -> None:
        self._messages.put_nowait({"type": "http.request", "body": b"x" * size, "more_body": more})

    async def send(self, size: int, *, more: bool = True) -> None:
        await self._asked.wait()
        self._asked.clear()
        self.put(size, more=more)
        await self._asked.wait()

    async def end(self) -> None:
        self.task.cancel()
        with suppress(asyncio.CancelledError, TooManyRequests):
            await self.task


def bodies_of(most: int = 3 * LONGEST) -> Bodies:
    return Bodies(Settings(max_body_bytes=LONGEST, max_inflight_body_bytes=most), FreedMemory())


@pytest.fixture
def passes() -> Iterator[Passes]:
    async def some() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    yield some


async def test_a_body_takes_its_room_once_it_is_not_small_and_gives_it_back_at_its_end() -> None:
    bodies = bodies_of()
    client = Client(bodies, "a", length=MIB)
    await client.send(FREE)
    assert bodies.budget.held == 0
    await client.send(1)
    assert bodies.budget.held == MIB
    await client.send(MIB - FREE - 1, more=False)
    assert bodies.budget.held == MIB  # until what was made of it is used
    client.leave.set()
    assert await client.task == MIB
    assert bodies.budget.held == 0


async def test_a_body_of_unknown_length_takes_room_for_the_longest_until_it_has_arrived() -> None:
    bodies = bodies_of()
    client = Client(bodies, "a")
    await client.send(2 * FREE)
    assert bodies.budget.held == LONGEST
    await client.send(0, more=False)
    assert bodies.budget.held == 2 * FREE
    client.leave.set()
    await client.task
    assert bodies.budget.held == 0


async def test_an_upload_whose_client_leaves_gives_its_room_back() -> None:
    bodies = bodies_of()
    client = Client(bodies, "a")
    await client.send(2 * FREE)
    assert bodies.budget.held == LONGEST
    await client.end()
    assert bodies.budget.held == 0


async def test_uploads_at_once_never_exceed_the_budget_and_all_get_through(passes: Passes) -> None:
    bodies = bodies_of()
    clients = [Client(bodies, f"s{number % 4}", length=LONGEST) for number in range(10)]
    for client in clients:
        client.leave.set()
        client.put(MIB)
    held = []
    for client in clients:
        await passes()
        held.append(bodies.budget.held)
        client.put(LONGEST - MIB, more=False)
    assert [await client.task for client in clients] == [LONGEST] * 10
    assert max(held) == 3 * LONGEST
    assert bodies.budget.held == 0


async def test_one_sender_gets_half_and_small_bodies_get_through_when_all_is_taken(passes: Passes) -> None:
    bodies = bodies_of()
    senders = [Client(bodies, "a", length=LONGEST) for _ in range(3)]
    for client in senders:
        client.put(MIB)
    await passes()
    assert bodies.budget.held == LONGEST
    other = Client(bodies, "b", length=LONGEST)
    other.put(MIB)
    third = Client(bodies, "c", length=LONGEST)
    third.put(MIB)
    await passes()
    assert bodies.budget.held == 3 * LONGEST
    small = Client(bodies, "d", length=FREE)
    small.leave.set()
    small.put(FREE, more=False)
    assert await small.task == FREE
    for client in (*senders, other, third):
        await client.end()
    assert bodies.budget.held == 0


async def test_those_who_wait_go_on_in_turn_by_sender(passes: Passes) -> None:
    bodies = bodies_of()
    holders = [Client(bodies, f"holder {number}", length=LONGEST) for number in range(3)]
    for holder in holders:
        holder.put(LONGEST, more=False)
    await passes()
    order: list[str] = []
    owners = ("many", "many", "many", "other")
    waiting = [Client(bodies, owner, length=LONGEST) for owner in owners]
    for client, owner in zip(waiting, owners, strict=True):
        client.put(LONGEST, more=False)
        client.task.add_done_callback(lambda _, owner=owner: order.append(owner))  # type: ignore[misc]
        client.leave.set()
    await passes()
    assert not order
    holders[0].leave.set()
    await asyncio.gather(*(client.task for client in waiting))
    assert order == ["many", "other", "many", "many"]
    for holder in holders[1:]:
        await holder.end()


async def test_a_body_that_waits_is_not_read_meanwhile(passes: Passes) -> None:
    bodies = bodies_of()
    holder, waiting = (Client(bodies, "a", length=LONGEST) for _ in range(2))
    holder.put(MIB)
    await passes()
    for _ in range(3):
        waiting.put(MIB)
    await passes()
    assert waiting.unread == 2
    await holder.end()
    await passes()
    assert waiting.unread == 0
    await waiting.end()


async def test_who_finds_no_room_in_time_is_told_the_setting(monkeypatch: pytest.MonkeyPatch, passes: Passes) -> None:
    monkeypatch.setattr(body_budget, "_WAIT_S", 0.0)
    bodies = bodies_of()
    holder, late = (Client(bodies, "a", length=LONGEST) for _ in range(2))
    holder.put(LONGEST, more=False)
    await passes()
    late.put(MIB)
    with pytest.raises(TooManyRequests, match="--max-inflight-body-bytes") as refused:
        await late.task
    assert refused.value.retry_after_s == 1.0
    assert bodies.budget.held == LONGEST
    await holder.end()


async def test_while_others_wait_an_upload_that_does_not_arrive_is_given_up(
    monkeypatch: pytest.MonkeyPatch, passes: Passes
) -> None:
    monkeypatch.setattr(body_budget, "_ARRIVAL_S", 0.0)
    monkeypatch.setattr(body_budget, "_LOOK_S", 0.0)
    bodies = bodies_of()
    stalled, whole, beside = (Client(bodies, owner, length=LONGEST) for owner in ("stalled", "whole", "beside"))
    for client, more in ((stalled, True), (whole, False), (beside, False)):
        client.put(LONGEST if not more else MIB, more=more)
    await passes()
    assert not stalled.task.done()  # nobody waits
    waiting = Client(bodies, "waiting", length=LONGEST)
    waiting.leave.set()
    waiting.put(LONGEST, more=False)
    assert await waiting.task == LONGEST
    with pytest.raises(TooManyRequests, match="--max-inflight-body-bytes"):
        await stalled.task
    assert stalled.task.cancelling() == 0
    assert not whole.task.done()
    for client in (whole, beside):
        await client.end()
    assert bodies.budget.held == 0


async def test_an_upload_is_not_given_up_for_a_sender_who_waits_for_his_own(
    monkeypatch: pytest.MonkeyPatch, passes: Passes
) -> None:
    monkeypatch.setattr(body_budget, "_ARRIVAL_S", 0.0)
    monkeypatch.setattr(body_budget, "_LOOK_S", 0.0)
    bodies = bodies_of()
    slow, whole, waiting = (Client(bodies, owner, length=LONGEST) for owner in ("slow", "a", "a"))
    slow.put(MIB)
    whole.put(LONGEST, more=False)
    await passes()
    waiting.put(MIB)
    await passes()
    assert not slow.task.done()
    for client in (slow, whole, waiting):
        await client.end()


async def test_a_cancelled_upload_that_was_given_up_at_the_same_moment_stays_cancelled() -> None:
    bodies = bodies_of()
    client = Client(bodies, "a")
    await client.send(2 * FREE)
    (share,) = bodies.budget._shares
    share.give_up()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    assert bodies.budget.held == 0
