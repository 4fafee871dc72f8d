"""One session from its start to its end: it ends once, whatever happens, and says who delivers it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import real_server, says, serving, user
from tokengrove.client import AsyncClient, Client
from tokengrove.client.options import SessionOptions
from tokengrove.errors import EndedOtherwise, InvalidRequest, ProxyError
from tokengrove.rollout.episode import BlockingEpisode, Deliverer, Episode, Overdue


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with serving(tmp_path, says(*["oak"] * 3)) as served, AsyncClient(app=served.app) as client:
        yield client


async def started(client: AsyncClient, session_id: str = "s") -> Episode:
    return await Episode.start(client, "t", {"session_id": session_id}, delivery="queue")


async def shown(client: AsyncClient, name: str = "s") -> dict[str, Any]:
    tree = await client.session_tree(name)
    return {"status": tree.status, "outcome": tree.outcome, **tree.extra}


async def test_a_start_says_who_delivers_the_session_unless_its_options_do(client: AsyncClient) -> None:
    told: list[tuple[Deliverer, SessionOptions, str]] = [
        ("queue", {}, "queue"),
        ("runner", {}, "runner"),
        ("runner", {"delivery": "queue"}, "queue"),
    ]
    for delivery, options, expected in told:
        episode = await Episode.start(client, "t", options, delivery=delivery)
        assert (await shown(client, episode.session_id))["delivery"] == expected


async def test_an_agent_plays_with_what_is_lent_to_it(client: AsyncClient) -> None:
    async with await started(client) as episode:
        assert episode.base_url == f"{episode.root_url}/v1"
        async with client.http_client() as http:
            answer = await http.post(
                f"{episode.base_url}/chat/completions",
                json={"messages": [user("Name a tree.")]},
                headers={"authorization": f"Bearer {episode.api_key}"},
            )
        assert answer.json()["choices"][0]["message"]["content"] == "oak"
        assert not episode.ended
    assert episode.ended
    assert (await shown(client))["status"] == "ended"


async def test_an_exception_that_leaves_the_block_is_the_reason_of_its_end(client: AsyncClient) -> None:
    with pytest.raises(KeyError):
        async with await started(client):
            raise KeyError("the board")
    found = await shown(client)
    assert (found["outcome"], found["exit_reason"]) == ("Failed", "KeyError: 'the board'")


async def test_a_block_that_is_cancelled_says_so(client: AsyncClient) -> None:
    inside = asyncio.Event()

    async def play() -> None:
        async with await started(client):
            inside.set()
            await asyncio.Event().wait()

    playing = asyncio.create_task(play())
    await inside.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    found = await shown(client)
    assert (found["outcome"], found["exit_reason"]) == ("Failed", "cancelled")


async def test_an_end_inside_of_the_block_is_its_end(client: AsyncClient) -> None:
    with pytest.raises(KeyError):
        async with await started(client) as episode:
            await episode.end(outcome="Finished")
            raise KeyError("too late")
    assert (await shown(client))["outcome"] == "Finished"


async def test_what_takes_too_long_is_overdue_and_its_cause_says_where_it_was(client: AsyncClient) -> None:
    async with await started(client) as episode:
        with pytest.raises(Overdue, match="too long") as caught:
            await episode.play(asyncio.Event().wait(), 0.01, "too long")
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert await episode.play(asyncio.sleep(0, "done"), None, "") == "done"


async def test_what_another_episode_inside_took_too_long_for_is_not_this_ones_time(client: AsyncClient) -> None:
    async with await started(client) as outer, await started(client, "inner") as inner:
        with pytest.raises(TimeoutError, match="too long") as caught:
            await outer.play(inner.play(asyncio.Event().wait(), 0.01, "too long"), 60.0, "of the outer")
        assert not isinstance(caught.value, Overdue)


async def test_what_is_played_again_is_withdrawn_also_after_its_end(client: AsyncClient) -> None:
    live, over = await started(client), await started(client, "over")
    await over.end(outcome="Finished")
    for episode in (live, live, over):
        await episode.withdraw(outcome="Failed", exit_reason="played again")
    assert live.ended
    found = await shown(client), await shown(client, "over")
    assert [(each["withdrawn"], each["outcome"]) for each in found] == [(True, "Failed"), (True, "Finished")]
    await client.delete_session("s")
    await live.withdraw()  # it counts for nothing already


async def test_an_end_that_cannot_be_sent_is_in_the_log(client: AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    episode = await started(client)
    await client.delete_session("s")
    with caplog.at_level(logging.WARNING, "tokengrove.rollout.episode"):
        await episode.fail(ValueError("a rule"))
    assert "session s could not be ended" in caplog.text
    with pytest.raises(ProxyError):
        await episode.end()


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with real_server(tmp_path_factory.mktemp("blocking")) as url, Client(url) as client:
        yield client


def started_here(client: Client, session_id: str) -> BlockingEpisode:
    return BlockingEpisode.start(client, "t", {"session_id": session_id}, delivery="runner")


def test_the_first_of_two_ends_counts(blocking: Client) -> None:
    episode = started_here(blocking, "twice")
    assert episode.fail("it was stopped", "Timeout") is True
    assert (episode.end(outcome="Finished"), episode.fail(KeyError("x")), episode.outcome) == (False, False, "Timeout")
    tree = blocking.session_tree("twice")
    assert (tree.outcome, tree.extra["exit_reason"], tree.extra["delivery"]) == ("Timeout", "it was stopped", "runner")


def test_threads_that_end_it_at_once_end_it_once(blocking: Client) -> None:
    episode, ends = started_here(blocking, "at-once"), list[bool]()
    threads = [threading.Thread(target=lambda: ends.append(episode.end(outcome="Finished"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ends) == [False, False, False, True]


def test_what_somebody_else_has_ended_has_failed(blocking: Client) -> None:
    episode = started_here(blocking, "theirs")
    httpx.post(f"{blocking.url}/theirs/rl/end_session", json={"outcome": "NoData"})
    with pytest.raises(EndedOtherwise):
        episode.end(outcome="Finished")
    assert (episode.outcome, episode.end(outcome="Finished")) == ("Failed", False)


def test_an_end_that_the_server_refuses_may_be_sent_again(blocking: Client) -> None:
    episode = started_here(blocking, "refused")
    with pytest.raises(InvalidRequest):
        episode.end(outcome="Won")
    assert episode.outcome is None and episode.end(outcome="Finished")
    assert episode.outcome == "Finished"
