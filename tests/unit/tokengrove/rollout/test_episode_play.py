"""One episode: what its session and its result say, whatever its agent and its reward function do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import Server as Served
from tests.support import says, serving, user
from tests.unit.tokengrove.rollout import episode_agents
from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import (
    AgentSpec,
    Episode,
    EpisodeEnded,
    EpisodePlan,
    EpisodeResult,
    RewardFailed,
    Server,
    Task,
    play,
)
from tokengrove.rollout.episodes.agent import Reward

HERE = "tests.unit.tokengrove.rollout.episode_agents"
TASK = Task("trees", {"question": "Name a tree.", "answer": "oak", "data_source": "trees"})


class Agent:
    """An agent whose `play` is a function of the episode; `http` reaches the server as the agent does."""

    def __init__(self, run: Callable[[Episode], Awaitable[Any]]) -> None:
        self._run = run

    async def play(self, episode: Episode) -> Reward:
        result: Reward = await self._run(episode)
        return result

    async def close(self) -> None: ...


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, says(*["oak"] * 8), admin_key="the-key") as server:
        yield server


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(app=served.app, admin_key="the-key") as client:
        yield client


def plan(**fields: Any) -> EpisodePlan:
    agent = AgentSpec("path", f"{HERE}:plain")
    return EpisodePlan(**{"task": TASK, "sample": 1, "attempt": 2, "server": Server("http://unused"), "agent": agent,
                          "session_id": "episode", "seed": 7, **fields})  # fmt: skip


async def turn(episode: Episode) -> str:
    """One turn of the agent; its id."""
    async with episode.client.http_client() as http:
        answer = await http.post(
            f"{episode.session.base_url}/chat/completions",
            json={"messages": [user("Name a tree.")]},
            headers={"authorization": f"Bearer {episode.session.api_key}"},
        )
    answer.raise_for_status()
    return str(answer.json()["id"])


async def played(client: AsyncClient, run: Callable[[Episode], Awaitable[Any]], **fields: Any) -> EpisodeResult:
    return await play(plan(**fields), Agent(run), client)


async def ended(client: AsyncClient, outcome: str) -> Any:
    """The session of the episode, which has ended with this outcome."""
    tree = await client.session_tree("episode")
    assert (tree.status, tree.outcome) == ("ended", outcome)
    return tree


async def test_a_result_says_what_the_session_has(client: AsyncClient) -> None:
    async def twice(episode: Episode) -> float:
        await turn(episode)
        await turn(episode)
        return 0.5

    result = await played(client, twice)
    tree = await ended(client, "Finished")
    assert tree.extra["metadata"] == {"task_id": "trees", "sample": 1, "attempt": 2, "seed": 7}
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, 0.5, 2)
    assert result.prompt_tokens == sum(node.prompt_tokens for node in tree.interactions)
    assert result.output_tokens == sum(node.output_tokens for node in tree.interactions)
    assert [node.reward for node in tree.interactions] == [None, 0.5]
    assert result.seconds > 0


async def test_rewards_of_two_answers_to_one_prompt_are_averaged_as_in_an_export(client: AsyncClient) -> None:
    async def twice(episode: Episode) -> dict[str, float]:
        return {await turn(episode): 1.0, await turn(episode): 0.0}

    result = await played(client, twice, options={"reward_scope": "path"})
    export = await client.export(session_id="episode")
    assert result.reward == export.sessions["episode"]["score"] == 0.5


async def test_an_agent_that_observes_the_same_twice_has_the_sum_of_its_rewards(client: AsyncClient) -> None:
    async def wall(episode: Episode) -> dict[str, float]:
        return {await turn(episode): 1.0, await turn(episode): 2.0}

    assert (await played(client, wall)).reward == 3.0


async def test_a_validation_episode_is_never_claimed(client: AsyncClient) -> None:
    await played(client, turn_for(1.0), validation=True, options={"metadata": {"set": "held out"}})
    tree = await ended(client, "Finished")
    assert tree.extra["metadata"]["validate"] is True
    assert tree.extra["metadata"]["set"] == "held out"
    assert (await client.claim()).claim_id is None


def turn_for(reward: Any) -> Callable[[Episode], Awaitable[Any]]:
    async def run(episode: Episode) -> Any:
        await turn(episode)
        return reward

    return run


async def raising(error: BaseException, episode: Episode) -> None:
    await turn(episode)
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("no tool"), "ValueError: no tool"),
        (TimeoutError("my own"), "TimeoutError: my own"),
        (SystemExit(3), "SystemExit: 3"),
        (pytest.fail.Exception("no leaf"), "Failed: no leaf"),
        (asyncio.CancelledError(), "the agent was cancelled from inside"),
    ],
)
async def test_an_agent_that_raises_makes_a_failed_episode(
    client: AsyncClient, error: BaseException, told: str
) -> None:
    result = await played(client, lambda episode: raising(error, episode))
    tree = await ended(client, "Failed")
    assert (result.failure, result.turns) == ("agent", 1)
    assert told in str(result.message)
    assert tree.extra["exit_reason"] == result.message


async def test_an_agent_that_hangs_is_cancelled_and_cleans_up(client: AsyncClient) -> None:
    cleaned = False

    async def hangs(episode: Episode) -> None:
        nonlocal cleaned
        await turn(episode)
        try:
            await asyncio.Event().wait()
        finally:
            cleaned = True

    result = await played(client, hangs, timeout_s=0.2)
    tree = await ended(client, "Timeout")
    assert cleaned
    assert (result.failure, tree.extra["finished"]) == ("timeout", False)
    assert "0.2 s (timeout_s)" in str(result.message)


async def test_an_agent_that_ignores_its_cancellation_is_closed(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.rollout.episode._GRACE_S", 0.01)
    cleaned = False

    async def stubborn(episode: Episode) -> None:
        nonlocal cleaned
        try:
            while True:
                try:
                    await asyncio.Event().wait()
                except asyncio.CancelledError:
                    continue
        finally:
            cleaned = True

    before = asyncio.all_tasks()
    result = await played(client, stubborn, timeout_s=0.01)
    assert (result.failure, cleaned) == ("timeout", True)
    await ended(client, "Timeout")
    assert not [task for task in asyncio.all_tasks() - before if "_contained" in repr(task)]


async def test_an_agent_without_a_turn_has_no_data(client: AsyncClient) -> None:
    async def idle(episode: Episode) -> float:
        return 1.0

    result = await played(client, idle)
    assert (result.failure, result.reward, result.turns) == ("no_data", None, 0)
    await ended(client, "NoData")


async def test_an_agent_ends_its_episode_with_an_outcome_and_metrics(client: AsyncClient) -> None:
    async def gives_up(episode: Episode) -> None:
        await turn(episode)
        episode.ending["metrics"] = {"steps": 3}
        raise EpisodeEnded("Timeout", "the game was too long")

    result = await played(client, gives_up)
    tree = await ended(client, "Timeout")
    assert (result.failure, result.message) == ("timeout", "the game was too long")
    assert tree.extra["metrics"] == {"steps": 3}


async def test_a_failure_tells_its_own_reason_whatever_the_agent_had_said_before(client: AsyncClient) -> None:
    async def fails(episode: Episode) -> None:
        await turn(episode)
        episode.ending["exit_reason"] = "solved"
        episode.ending["outcome"] = "Finished"
        raise ValueError("the game is broken")

    result = await played(client, fails)
    tree = await ended(client, "Failed")
    assert (result.failure, tree.extra["exit_reason"]) == ("agent", "ValueError: the game is broken")


async def test_the_reward_of_the_agent_is_not_added_to_that_of_the_reward_function(client: AsyncClient) -> None:
    async def forges(episode: Episode) -> dict[str, float]:
        first = await turn(episode)
        await turn(episode)
        return {first: 5.0}

    result = await played(client, forges, reward="tests.unit.tokengrove.runs.run_agents:half")
    tree = await ended(client, "Finished")
    assert ([node.reward for node in tree.interactions], result.reward) == ([None, 0.5], 0.5)


async def test_metrics_that_cannot_be_sent_fail_the_episode_and_end_it(client: AsyncClient) -> None:
    async def odd(episode: Episode) -> float:
        await turn(episode)
        episode.ending["metrics"] = {"odd": object()}
        return 1.0

    result = await played(client, odd)
    assert (result.failure, result.reward) == ("agent", 1.0)
    assert "metrics" in str(result.message)
    await ended(client, "Failed")


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (float("nan"), "nan; a reward must be a finite number"),
        ("good", "'good' of type str"),
        ({"chatcmpl-other": 1.0}, "no complete interaction 'chatcmpl-other'"),
    ],
)
async def test_a_reward_of_the_agent_that_is_none_fails_the_episode(
    client: AsyncClient, reward: Any, told: str
) -> None:
    result = await played(client, turn_for(reward))
    assert (result.failure, result.reward) == ("agent", None)
    assert told in str(result.message)
    await ended(client, "Failed")


@pytest.mark.parametrize(
    ("function", "reward"),
    [("by_messages", 1.0), ("by_turn", 0.5), ("nothing", 0.5), ("of_verl", 1.0), ("of_trl", 1.0)],
)
async def test_a_reward_function_gets_what_it_takes_by_name(client: AsyncClient, function: str, reward: float) -> None:
    task = Task("t", {**TASK.data, "reward_model": {"ground_truth": "oak"}})
    result = await played(client, turn_for(0.5), reward=f"{HERE}:{function}", task=task)
    assert (result.failure, result.reward) == (None, reward)


async def test_named_values_of_a_reward_function_are_scores_beside_the_reward(client: AsyncClient) -> None:
    task = Task("t", {**TASK.data, "reward_model": {"ground_truth": "oak"}})
    result = await played(client, turn_for(0.5), reward=f"{HERE}:of_verl_with_more", task=task)
    assert (result.failure, result.reward, result.scores) == (None, 1.0, {"acc": 1.0})
    await ended(client, "Finished")
    exported = await client.export(session_id="episode")
    assert exported.samples[0].turns[0]["rewards"] == {"acc": 1.0}


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("unscored", "a dict in which 'score' is 'good' of type str; it must be a number"),
        ("endless", "9999...; a reward must be a finite number"),
        ("broken", "LookupError: no such tree"),
        ("exits", "SystemExit: 2"),
        ("asserts", "Failed: the tree is wrong"),
        ("not_a_number", "nan; a reward must be a finite number"),
        ("never", "has not ended within 0.2 s"),
        ("wants_more", "has the parameter 'rubric', which is none of messages, "),
        ("too_many", "returned 2 rewards for one completion"),
        ("no_list", "returned 'float'; with a parameter 'completions', return a list"),
        ("constant", "is not a function but 'int'"),
        ("missing", "has no 'missing'"),
    ],
)
async def test_a_reward_function_that_fails_fails_its_episode(client: AsyncClient, function: str, told: str) -> None:
    result = await played(client, turn_for(0.5), reward=f"{HERE}:{function}", scoring_timeout_s=0.2)
    assert (result.failure, result.reward, result.turns) == ("reward", None, 1)
    assert told in str(result.message)
    await ended(client, "Failed")


async def test_an_address_without_a_server_is_a_failure_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.rollout.session_start.UNREACHABLE_S", 0.0)
    result = await play(plan(server=Server("http://127.0.0.1:9")), Agent(turn_for(1.0)))
    assert (result.failure, result.turns) == ("server", 0)
    assert "no session could start" in str(result.message)


async def test_an_expired_session_is_a_failure_of_the_server(client: AsyncClient) -> None:
    async def deleted(episode: Episode) -> float:
        await turn(episode)
        await episode.client.delete_session("episode")
        return 1.0

    result = await played(client, deleted)
    assert result.failure == "server"


@pytest.mark.parametrize("at", ["agent", "reward"])
async def test_a_cancelled_episode_ends_its_session(client: AsyncClient, at: str) -> None:
    begun = asyncio.Event()

    async def waits(episode: Episode) -> float:
        await turn(episode)
        if at == "agent":
            begun.set()
            await asyncio.Event().wait()
        asyncio.get_running_loop().call_later(0.05, begun.set)
        return 1.0

    playing = asyncio.create_task(played(client, waits, reward=f"{HERE}:never"))
    await begun.wait()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    tree = await ended(client, "Failed")
    assert tree.extra["exit_reason"] == "cancelled"


async def test_a_blocking_agent_that_hangs_is_left_and_its_key_opens_nothing(
    client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.rollout.episode._GRACE_S", 0.01)
    keys = list[str]()

    async def blocks(episode: Episode) -> None:
        keys.append(episode.session.api_key)
        await asyncio.to_thread(episode_agents.released.wait)

    result = await played(client, blocks, timeout_s=0.05)
    episode_agents.released.set()
    assert result.failure == "timeout"
    async with client.http_client() as http:
        answer = await http.post(
            f"{client.url}/episode/v1/chat/completions",
            json={"messages": [user("Hello")]},
            headers={"authorization": f"Bearer {keys[0]}"},
        )
    assert answer.status_code == 403


async def test_the_session_of_an_attempt_that_is_repeated_is_withdrawn(client: AsyncClient) -> None:
    async def fails(episode: Episode) -> None:
        await raising(ValueError("no tool"), episode)

    result = await played(client, fails, discard=frozenset({"agent"}))
    assert (result.failure, result.turns) == ("agent", 1)
    (listed,) = await client.sessions()
    told = (listed["withdrawn"], listed["outcome"], listed["exit_reason"], listed["delivery"])
    assert told == (True, "Failed", "ValueError: no tool", "queue")
    assert (await client.export()).left_out == {"withdrawn": 1}


async def test_a_verifier_of_the_agent_gives_scores_or_fails(client: AsyncClient) -> None:
    async def verified(episode: Episode) -> float:
        await turn(episode)
        episode.scores["style"] = 0.5
        raise RewardFailed("the verifier ended with 2")

    result = await played(client, verified)
    assert (result.failure, result.message, result.scores) == ("reward", "the verifier ended with 2", {"style": 0.5})


async def test_what_an_agent_does_to_its_row_reaches_neither_others_nor_its_reward(client: AsyncClient) -> None:
    async def forges(episode: Episode) -> None:
        await turn(episode)
        dict.update(episode.task.data, answer="beech")  # type: ignore[arg-type]

    task = Task("t", {"answer": "oak", "data_source": "trees", "reward_model": {"ground_truth": "oak"}})
    result = await played(client, forges, reward=f"{HERE}:of_verl", task=task)
    assert (result.failure, result.reward, task.data["answer"]) == (None, 1.0, "oak")
    result = await played(client, forges, session_id="other", reward=f"{HERE}:by_messages", task=task)
    assert (result.failure, result.reward) == (None, 1.0)


async def test_a_message_has_no_keys_and_no_more_than_a_database_stores(client: AsyncClient) -> None:
    address = ""

    async def fails(episode: Episode) -> None:
        nonlocal address
        address = episode.session.base_url
        await turn(episode)
        raise EpisodeEnded("Failed", f"no answer from {address}\0 {'x' * 10_000}")

    result = await played(client, fails)
    tree = await ended(client, "Failed")
    message = str(result.message)
    assert message == tree.extra["exit_reason"]
    assert "~..." in message and address not in message
    assert "\0" not in message and len(message) < 5_000


async def test_a_reward_function_of_trl_gets_texts_if_the_prompt_is_one(client: AsyncClient) -> None:
    task = Task("t", {"prompt": "Name a tree.", "answer": "oak"})
    result = await played(client, turn_for(0.5), reward=f"{HERE}:of_trl_texts", task=task)
    assert (result.failure, result.message, result.reward) == (None, None, 1.0)
