"""What an earlier start of a run left on the server: which sessions count, and which are withdrawn."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import says, serving, user
from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.runs.leftovers import clean, recovered, sessions_of
from tokengrove.runs.slots import Entry, Slot

SLOT = Slot(0, "t", 0)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with serving(tmp_path, says(*["oak"] * 2)) as served, AsyncClient(app=served.app) as client:
        yield client


async def left(client: AsyncClient, name: str, outcome: Any = "Finished", **metadata: Any) -> str:
    """A session of sample 0 of the run `r`, ended with `outcome` unless that is None."""
    mark = {"tokengrove_run": "r", "tokengrove_episode": [0, "t", 0, 0], **metadata}
    session = await client.start_session("t", session_id=name, metadata=mark)
    if outcome is not None:
        await session.end(outcome=outcome)
    return session.session_id


def entry(session_id: str, *, again: bool = False) -> Entry:
    return Entry(SLOT, EpisodeResult("t", 0, 0, session_id, failure="worker" if again else None), again)


async def cleaned(client: AsyncClient, *known: Entry) -> tuple[list[str], list[str]]:
    """The sessions that are to be counted, and those that count on the server afterwards."""
    found = await clean(client, "r", known, "http://s")
    left = [each["session_id"] for each in await sessions_of(client, "r") if not each["withdrawn"]]
    return [each.session_id for each in found], sorted(left)


async def test_one_of_two_sessions_that_finished_an_episode_is_counted_and_the_other_is_withdrawn(
    client: AsyncClient,
) -> None:
    names = {await left(client, "one"), await left(client, "two")}
    counted, kept = await cleaned(client)
    assert counted == kept and len(counted) == 1 and counted[0] in names


async def test_a_session_that_finished_an_episode_which_the_journal_has_is_withdrawn(client: AsyncClient) -> None:
    await left(client, "second")
    assert await cleaned(client, entry(await left(client, "noted"))) == ([], ["noted"])


async def test_a_session_of_an_attempt_that_was_repeated_is_withdrawn(client: AsyncClient) -> None:
    await left(client, "repeated", "Failed")
    known = entry("repeated", again=True), entry(await left(client, "noted"))
    assert await cleaned(client, *known) == ([], ["noted"])


@pytest.mark.parametrize("outcome", ["Failed", "Timeout", "NoData", None])
async def test_a_session_that_did_not_finish_and_that_the_journal_lacks_is_withdrawn(
    client: AsyncClient, outcome: str | None
) -> None:
    await left(client, "unknown", outcome)
    assert await cleaned(client) == ([], [])


async def test_a_session_for_validation_is_counted_like_others(client: AsyncClient) -> None:
    assert await cleaned(client) == ([], [])
    name = await left(client, "measured", validate=True)
    assert await cleaned(client) == ([name], [name])


async def test_a_session_of_another_run_is_left_alone(client: AsyncClient) -> None:
    await left(client, "other", tokengrove_run="s")
    assert await cleaned(client) == ([], [])
    assert [each["session_id"] for each in await sessions_of(client, "s")] == ["other"]


async def test_a_recovered_episode_has_the_reward_the_scores_and_the_numbers_of_its_session(
    client: AsyncClient,
) -> None:
    mark = {"tokengrove_run": "r", "tokengrove_episode": [1, "t", 2, 3]}
    session = await client.start_session("t", session_id="told", metadata=mark)
    async with client.http_client() as http:
        for value in (1.0, 0.5):
            await http.post(
                f"{session.base_url}/chat/completions",
                json={"messages": [user("Name a tree.")]},
                headers={"authorization": f"Bearer {session.api_key}"},
            )
            await session.set_reward(value, name="style")
    await session.set_reward(0.25)
    await session.end(outcome="Finished")
    (found,) = await clean(client, "r", [], "http://s")
    slot, result, again = await recovered(client, found)
    assert (slot, result.attempt, again, result.failure) == (Slot(1, "t", 2), 3, False, None)
    assert (result.reward, result.scores, result.turns) == (0.25, {"style": 0.75}, 2)
    assert result.prompt_tokens > 0 and result.output_tokens > 0
