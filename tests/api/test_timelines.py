"""Each turn notes when it reached what, in order; what happened to it besides is an event."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.telemetry.timeline import Timeline
from tests.support import Server, sampled, says, serving, until, user

CHAT = "/s/v1/chat/completions"
BODY = {"model": "m", "messages": [user("hi")]}
RETRY = {"idempotency-key": "k"}
TURN = ["match", "render", "queue", "generate", "commit"]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [user("hi")], "max_tokens": 9},
    "responses": {"input": "hi", "max_output_tokens": 9},
    "messages": {"messages": [user("hi")], "max_tokens": 9},
    "completions": {"prompt": "hi", "max_tokens": 9},
    "generate": {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 9}},
}

UNSTREAMED = ("generate", True)


def latest(server: Server) -> Timeline:
    """The timeline of the request that the engine got last."""
    return server.engine.requests[-1].timeline


def names(timeline: Timeline) -> list[str]:
    return [phase.name for phase in timeline.phases()]


@pytest.mark.parametrize(("api", "stream"), [(a, s) for a in BODIES for s in (False, True) if (a, s) != UNSTREAMED])
async def test_a_turn_of_each_api_notes_its_moments_in_order(tmp_path: Path, api: str, stream: bool) -> None:
    async with serving(tmp_path, says("hello", "again")) as server:
        for _ in range(2):  # the second continues nothing, or the first: both have a match
            body = {"model": "m", "stream": stream, **BODIES[api]}
            response = await server.post(f"/s/v1/{api}", body)
            assert response.status_code == 200, response.text
            found = latest(server)
            moments = [
                *(found.received, found.read, found.begun, found.matched, found.rendered, found.admitted),
                *(found.first_token, found.sampled, found.commit_begun, found.committed, found.ended),
            ]
            assert None not in moments
            assert moments == sorted(moments)  # type: ignore[type-var]
            assert names(found) == TURN
            assert (found.held, found.failed, found.events) == (None, None, ())


async def test_choices_share_the_moments_until_their_prompt_and_have_their_own_afterwards(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.chat([user("hi")], n=2)
        first, second = (request.timeline for request in server.engine.requests)
        assert first is not second
        assert (first.received, first.rendered) == (second.received, second.rendered)
        assert names(first) == names(second) == TURN
        assert first.committed is not None and second.committed is not None
        assert first.committed < second.committed


async def test_a_turn_that_waits_for_a_pause_to_end_was_queued_first(tmp_path: Path) -> None:
    async with serving(tmp_path, says("hello")) as server:
        await server.ok("/engine/pause_generation", {})
        turn = asyncio.create_task(server.chat([user("hi")]))
        await until(lambda: server.app.state.turns.running.busy)
        await server.ok("/engine/continue_generation", {})
        await turn
        assert names(latest(server)) == ["queue", *TURN]


async def test_a_failed_turn_notes_when_it_failed(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("hello"), fault=Fault.ERROR)])) as server:
        assert (await server.post(CHAT, BODY)).status_code >= 500
        found = latest(server)
        assert names(found) == ["match", "render", "queue", "generate"]
        assert found.failed is not None and found.ended is not None and found.failed <= found.ended
        assert found.phases()[-1].end == found.failed


async def test_a_retry_notes_that_it_attached_or_was_replayed(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)])) as server:
        turns, asked = server.app.state.turns, []
        begin = turns.begin

        async def noting(session: Any, request: Any, **more: Any) -> Any:
            asked.append(request.timeline)
            return await begin(session, request, **more)

        turns.begin = noting
        first = asyncio.create_task(server.post(CHAT, BODY, headers=RETRY))
        await until(lambda: len(server.engine.requests) == 1)
        await asyncio.gather(first, server.post(CHAT, BODY, headers=RETRY))
        await server.post(CHAT, BODY, headers=RETRY)
        assert [[event.name for event in timeline.events] for timeline in asked] == [[], ["attached"], ["replayed"]]


async def test_a_pause_that_interrupts_a_turn_is_among_its_events(tmp_path: Path) -> None:
    async with serving(tmp_path, play([Reply(sampled("one two three"), delay_s=0.03)] * 2)) as server:
        turn = asyncio.create_task(server.chat([user("hi")]))
        await until(lambda: server.app.state.turns.running.busy and bool(server.engine.requests))
        await server.ok("/engine/pause_generation", {"mode": "abort"})
        await server.ok("/engine/continue_generation", {})
        await turn
        assert [event.name for event in latest(server).events] == ["submitted_again"]
        assert latest(server) is server.engine.requests[0].timeline
