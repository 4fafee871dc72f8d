"""Scorers: what they get, what becomes of their scores, and what their failures leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import Server as Served
from tests.support import says, serving, user
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play, resolve_agent
from tokengrove.rollout.episodes import check_functions as check
from tokengrove.rollout.scorers import (
    Scorer,
    Trajectory,
    Turn,
    load_scorer,
    score_sessions,
    score_trajectory,
    trajectory_scorer,
    turn_scorer,
)
from tokengrove.rollout.scorers.scorer import as_scorer

HERE = "tests.unit.tokengrove.rollout.scorers_of_tests"
TASK = Task("trees", {"question": "Name a tree.", "answer": "oak"})


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(tmp_path, says(*["oak"] * 8), admin_key="the-key") as server:
        yield server


@pytest.fixture
async def client(served: Served) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(app=served.app, admin_key="the-key") as client:
        yield client


def of_turns(*texts: str) -> Trajectory:
    """A trajectory of these replies, without a server."""
    turns = [Turn(f"turn-{at}", at, [user("Go")], {"role": "assistant", "content": text}, "main")
             for at, text in enumerate(texts)]  # fmt: skip
    session: Any = SimpleNamespace(session_id="s")
    return Trajectory("s", {"answer": "oak"}, turns, session)


class Recorded:
    """What was recorded, by interaction and name."""

    def __init__(self) -> None:
        self.rewards: dict[tuple[str, str], float] = {}

    async def __call__(self, body: Mapping[str, Any]) -> None:
        self.rewards[body["interaction_id"], body["name"]] = body["reward"]


async def test_each_scorer_is_called_for_its_parts() -> None:
    scorers = [load_scorer(f"{HERE}:{name}") for name in ("by_length", "first_only", "by_id", "plain", "marked")]
    recorded = Recorded()
    scored = await score_trajectory(scorers, of_turns("oak", "beech"), recorded)
    assert recorded.rewards == {
        ("turn-0", "length"): 3.0,
        ("turn-1", "length"): 5.0,
        ("turn-0", "first_only"): 1.0,
        ("turn-0", "by_id"): 0.25,
        ("turn-1", "by_id"): 0.25,
        ("turn-1", "plain"): 1.0,
        ("turn-0", "marked"): 3.0,
        ("turn-1", "marked"): 5.0,
    }
    assert scored.scores == {"length": 4.0, "first_only": 1.0, "by_id": 0.25, "plain": 1.0, "marked": 4.0}
    assert not scored.failures


async def test_scorers_run_at_once_and_one_of_them_so_often_as_it_says() -> None:
    both, running, most = asyncio.Barrier(2), 0, 0

    @turn_scorer(concurrency=2)
    async def one(turn: Turn) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await both.wait()
        running -= 1
        return 1.0

    @trajectory_scorer
    async def other(trajectory: Trajectory) -> float:
        return 1.0

    scored = await score_trajectory([one, other], of_turns("a", "b", "c", "d"), Recorded())
    assert scored.scores == {"one": 1.0, "other": 1.0}
    assert most == 2


async def test_the_episodes_of_a_process_share_the_places_of_a_scorer() -> None:
    both, running, most = asyncio.Barrier(16), 0, 0

    async def unmarked(turn: Turn) -> float:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await both.wait()
        running -= 1
        return 1.0

    episodes = [score_trajectory([as_scorer(unmarked, "u")], of_turns(*"abcd"), Recorded()) for _ in range(8)]
    assert [scored.scores for scored in await asyncio.gather(*episodes)] == [{"unmarked": 1.0}] * 8
    assert most == 16


async def test_a_scorer_that_fails_leaves_the_scores_of_the_others() -> None:
    @trajectory_scorer(timeout_s=0.01)
    async def slow(trajectory: Trajectory) -> None:
        await asyncio.Event().wait()

    @turn_scorer
    def odd(turn: Turn) -> Any:
        return "good" if turn.index else float("nan")

    broken = load_scorer(f"{HERE}:breaks")
    scored = await score_trajectory(
        [slow, odd, broken, load_scorer(f"{HERE}:by_length")], of_turns("a", "b"), Recorded()
    )
    assert scored.scores == {"length": 1.0}
    assert [str(failure) for failure in scored.failures] == [
        "scorer slow: TimeoutError: slow has not ended within 0.01 s",
        "scorer odd of turn-0: ValueError: scorer odd returned nan; a reward must be a finite number",
        "scorer odd of turn-1: TypeError: scorer odd returned 'good' of type str; "
        "return a number, or None for no score",
        "scorer breaks: LookupError: the judge is away",
    ]


async def test_cancelled_scoring_cancels_the_scorers() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    @trajectory_scorer
    async def waits(trajectory: Trajectory) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    scoring = asyncio.create_task(score_trajectory([waits], of_turns("a"), Recorded()))
    await begun.wait()
    scoring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scoring
    assert ended.is_set()


def test_a_scorer_can_be_called_as_the_function_that_it_is() -> None:
    @turn_scorer
    def length(turn: Turn) -> float:
        return float(len(turn.text))

    assert length(of_turns("oak").turns[0]) == 3.0


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: load_scorer(f"{HERE}:unmarked"), "does not say what it scores: decorate it with turn_scorer"),
        (lambda: load_scorer(f"{HERE}:Turn"), "is not a scorer but 'type'"),
        (lambda: Scorer(len, "two words", "turn"), "not a valid name of a scorer"),
        (lambda: Scorer(len, "length", "turn", concurrency=0), "'concurrency' must be at least 1"),
        (lambda: Scorer(len, "length", "turn", timeout_s=0), "'timeout_s' must be above 0"),
        (lambda: check(None, [f"{HERE}:plain"], Task("t", {})), "has the parameter 'answer', which is none of"),
        (lambda: check(None, [f"{HERE}:plain"] * 2, TASK), "two scorers have the name 'plain'"),
    ],
)
def test_what_is_no_scorer_is_refused(make: Any, told: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        make()
    assert told in str(raised.value)


async def played(client: AsyncClient, *scorers: str, **fields: Any) -> EpisodeResult:
    spec = AgentSpec("path", "tests.unit.tokengrove.rollout.episode_agents:plain")
    plan = EpisodePlan(TASK, 0, 0, Server(""), spec, "episode", scorers=tuple(f"{HERE}:{each}" for each in scorers),
                       **fields)  # fmt: skip
    return await play(plan, resolve_agent(spec), client)


async def test_scores_of_an_episode_are_named_rewards_of_its_exports(client: AsyncClient) -> None:
    result = await played(client, "by_length", "judged")
    assert (result.failure, result.reward) == (None, 0.5)
    assert result.scores == {"length": 3.0, "judge/grade": 2.5}
    (sample,) = (await client.export(session_id="episode", reward_name="judge/grade")).samples
    assert sample.rewards.tolist() == [2.5]
    assert sample.turns[0]["rewards"] == {"length": 3.0, "judge/grade": 2.5}


async def test_a_scorer_asks_the_server_itself_outside_of_the_session(client: AsyncClient) -> None:
    result = await played(client, "asks_the_policy")
    assert (result.failure, result.scores, result.turns) == (None, {"asks_the_policy": 2.0}, 1)


async def test_a_scorer_that_fails_fails_the_episode_and_the_other_scores_stay(client: AsyncClient) -> None:
    result = await played(client, "by_length", "breaks")
    assert (result.failure, result.reward, result.scores) == ("scorer", 0.5, {"length": 3.0})
    assert result.message == "scorer breaks: LookupError: the judge is away"
    tree = await client.session_tree("episode")
    assert (tree.outcome, tree.extra["exit_reason"]) == ("Failed", result.message)
    assert (await client.show_turn("episode", 0))["rewards"] == {"length": 3.0}


async def test_sessions_that_have_ended_are_scored_once(client: AsyncClient, served: Served) -> None:
    for name in ("first", "second", "empty"):
        async with client.session("trees", session_id=name, metadata={"answer": "oak"}) as session:
            key = {"authorization": f"Bearer {session.api_key}"}
            for text in () if name == "empty" else ("Hello", "And?"):
                await served.http.post(f"/{name}/v1/chat/completions", json={"messages": [user(text)]}, headers=key)
    calls = 0

    async def counted(turn: Turn, answer: str) -> float:
        nonlocal calls
        calls += 1
        return float(turn.text == answer)

    scorers = [counted, f"{HERE}:breaks"]
    scored = await score_sessions(client, {"status": "ended"}, scorers, concurrency=2)
    assert [(each.session_id, each.scores) for each in scored] == [
        ("first", {"counted": 1.0}),
        ("second", {"counted": 1.0}),
        ("empty", {}),
    ]
    assert [len(each.failures) for each in scored] == [1, 1, 0]
    assert calls == 4
    await score_sessions(client, None, [counted])
    assert calls == 4
    await score_sessions(client, {"task_id": "trees"}, [counted], again=True)
    assert calls == 8


async def test_a_session_of_which_some_turns_were_scored_is_scored_again(client: AsyncClient, served: Served) -> None:
    """A call that was interrupted leaves such sessions."""
    async with client.session("trees", session_id="half", metadata={"answer": "oak"}) as session:
        key = {"authorization": f"Bearer {session.api_key}"}
        for text in ("Hello", "And?"):
            await served.http.post("/half/v1/chat/completions", json={"messages": [user(text)]}, headers=key)
        first, _ = (await client.session_tree("half")).interactions
        await session.set_reward(0.5, interaction_id=first.id, name="exact")

    async def exact(turn: Turn, answer: str) -> float:
        return float(turn.text == answer)

    (scored,) = await score_sessions(client, None, [exact])
    assert scored.scores == {"exact": 1.0}
    assert (await client.show_turn("half", 1))["rewards"] == {"exact": 1.0}
