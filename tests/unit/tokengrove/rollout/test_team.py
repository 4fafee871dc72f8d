"""An episode of several agents on live servers, each agent an unmodified OpenAI SDK that knows an address and a key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import default_url, real_server, shared_renderer, user
from tests.wide import CROSSED
from tokengrove.client import AsyncClient, Export
from tokengrove.errors import InvalidRequest, NotFound, TooManyRequests
from tokengrove.rollout.team import Member, Team

KEY = "a-key-of-the-administrator"
AGENTS = ("planner", "coder")
EARNED: dict[str, tuple[float, ...]] = {"planner": (1.0, 0.0, 1.0, 0.0), "coder": (4.0, 4.0, 8.0, 0.0)}


@pytest.fixture(params=[None, KEY], ids=["open", "keyed"], scope="module")
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str | None]]:
    """Address and key of an open server, then of a keyed one, both with deterministic words."""
    folder: Path = tmp_path_factory.mktemp("team")
    keyed = {"admin_key": request.param} if request.param else {}
    with real_server(folder, engine_arg=("play=babble", "tokens=4"), **keyed) as url:
        yield url, request.param


@pytest.fixture
async def client(server: tuple[str, str | None]) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(*server) as client:
        yield client


async def play(member: Member, turns: int = 2) -> list[tuple[list[int], list[int]]]:
    """Hold a conversation as a stock agent does; return the prompt and the sampled ids of each turn."""
    messages: list[Any] = [{"role": "system", "content": f"You are the {member.name}."}]
    seen = []
    async with AsyncOpenAI(base_url=member.base_url, api_key=member.api_key) as agent:
        for number in range(turns):
            messages.append(user(f"Step {number}."))
            reply = await agent.chat.completions.create(
                model="any", messages=messages, extra_body={"return_token_ids": True}
            )
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            seen.append((reply.prompt_token_ids, reply.choices[0].token_ids))  # type: ignore[attr-defined]
    return seen


def check_tokens(export: Export, agent: str, seen: list[tuple[list[int], list[int]]]) -> None:
    """Check the one sample of an agent token by token: its last prompt and answer, trained where it was sampled."""
    (sample,) = (each for each in export.samples if each.agent == agent)
    (first, answer), (last, end) = seen
    assert sample.input_ids.tolist() == [*last, *end]
    trained = [0] * (len(last) + len(end))
    trained[len(first) : len(first) + len(answer)] = [1] * len(answer)
    trained[len(last) :] = [1] * len(end)
    assert sample.loss_mask.tolist() == trained


@CROSSED
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
async def test_episodes_of_a_group_are_exported_and_compared_agent_by_agent(client: AsyncClient, shared: bool) -> None:
    group = f"group-{shared}"
    teams, seen = [], []
    for number in range(4):
        async with Team(
            client, "pair", AGENTS, shared=shared, group_id=group, group_size=4, metadata={"step": 7}
        ) as team:
            seen.append(await asyncio.gather(*(play(team[name]) for name in AGENTS)))
            await team.end({name: EARNED[name][number] for name in AGENTS}, outcome="Finished", metrics={"won": 1})
        teams.append(team)
    for team, turns in zip(teams, seen, strict=True):
        assert len(team.session_ids) == (1 if shared else 2)
        own = await team.export()
        for name, each in zip(AGENTS, turns, strict=True):
            check_tokens(own, name, each)
        found = await client.export(filter={"metadata": {"episode": team.episode_id, "step": 7}})
        assert {sample.session_id for sample in found.samples} == set(team.session_ids)
        assert {entry["outcome"] for entry in found.sessions.values()} == {"Finished"}
    both = await client.export(filter={"group_id": group}, reward_scope="agent", advantages="leave_one_out")
    assert len(both.samples) == 8
    for name in AGENTS:
        expected = [(value, pytest.approx(value - (sum(EARNED[name]) - value) / 3)) for value in EARNED[name]]
        by_team = [
            (sample.reward, sample.advantage)
            for team in teams
            for sample in both.samples
            if sample.agent == name and sample.session_id in team.session_ids
        ]
        assert by_team == expected
        alone = await client.export(filter={"group_id": group, "agent": name}, advantages="leave_one_out")
        assert sorted((s.reward, s.advantage) for s in alone.samples) == sorted(by_team)
    claimed = await client.claim(
        limit=100, filter={"group_id": group}, export={"reward_scope": "agent", "advantages": "leave_one_out"}
    )
    assert claimed.export is not None and len(claimed.sessions) == (4 if shared else 8)  # the group is leased whole
    assert sorted(sample.advantage or 0 for sample in claimed.export.samples) == pytest.approx(
        sorted(sample.advantage or 0 for sample in both.samples)
    )


@CROSSED
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
async def test_a_team_that_earns_together_has_one_reward_for_all_that_took_part(
    client: AsyncClient, shared: bool
) -> None:
    async with Team(client, "trio", ["a", "b", "idle"], shared=shared) as team:
        with pytest.raises(NotFound, match="no agent of episode"):
            await team.set_reward(1.0)
        await asyncio.gather(play(team["a"]), play(team["b"]))
        await team.set_reward(0.25, name="style")
        with pytest.raises(NotFound, match="no complete turn of agent 'idle'"):
            await team.set_reward(1.0, agent="idle")
        with pytest.raises(InvalidRequest, match="'step_scores' names turns of one agent"):
            await team.set_reward(step_scores=[1.0, 2.0])
        await team.set_reward(agent="a", step_scores=[0.0, 0.0])
        await team.end(0.5)
    export = await team.export()
    assert {(sample.agent, sample.reward) for sample in export.samples} == {("a", 0.5), ("b", 0.5)}
    styles = await team.export(reward_name="style")
    assert {(sample.agent, sample.reward) for sample in styles.samples} == {("a", 0.25), ("b", 0.25)}


async def test_sessions_of_one_agent_are_claimed_alone_and_those_of_the_others_afterwards(client: AsyncClient) -> None:
    for number in range(2):
        async with Team(client, "pair", AGENTS, group_id="alone", group_size=2) as team:
            await asyncio.gather(*(play(team[name], 1) for name in AGENTS))
            await team.end({name: EARNED[name][number + 1] for name in AGENTS})
    for name, earned in (("coder", [(4.0, -4.0), (8.0, 4.0)]), ("planner", [(0.0, -1.0), (1.0, 1.0)])):
        mine = {"group_id": "alone", "metadata": {"agent": name}}
        claim = await client.claim(limit=10, filter=mine, export={"advantages": "leave_one_out"})
        assert claim.export is not None
        assert [(each.agent, each.reward, each.advantage) for each in claim.export.samples] == [
            (name, *each) for each in earned
        ]
        await client.acknowledge(claim)


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
async def test_a_failure_in_the_block_fails_every_session(client: AsyncClient, shared: bool) -> None:
    team = Team(client, "pair", AGENTS, shared=shared)
    with pytest.raises(RuntimeError, match="the tests hang"):
        async with team:
            await play(team["coder"])
            raise RuntimeError("the tests hang")
    listed = [entry for entry in await client.sessions() if entry["session_id"] in team.session_ids]
    said = [(entry["status"], entry["outcome"], entry["exit_reason"]) for entry in listed]
    assert said == [("ended", "Failed", "RuntimeError: the tests hang")] * len(team.session_ids)
    with pytest.raises(ValueError, match="make another Team"):
        async with team:
            pass


async def test_a_cancelled_episode_leaves_no_session_open(client: AsyncClient) -> None:
    team, began = Team(client, "pair", AGENTS), asyncio.Event()

    async def episode() -> None:
        async with team:
            began.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(episode())
    await began.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    states = [await client.session_tree(name) for name in team.session_ids]
    assert [(tree.status, tree.outcome) for tree in states] == [("ended", "Failed")] * 2


async def test_a_start_without_room_ends_what_it_started(tmp_path: Path) -> None:
    with real_server(tmp_path, engine_arg=("tokens=4",), max_live_sessions=1) as url:
        async with AsyncClient(url) as client:
            team = Team(client, "pair", AGENTS, start_timeout_s=0.0)
            with pytest.raises(TooManyRequests):
                await team.__aenter__()
            (listed,) = await client.sessions()
            assert (listed["status"], listed["outcome"]) == ("ended", "Failed")
            async with Team(client, "pair", AGENTS, shared=True, start_timeout_s=0.0):  # there is room again
                pass


async def test_a_block_that_ends_nothing_ends_all_sessions_without_an_outcome(client: AsyncClient) -> None:
    async with Team(client, "pair", AGENTS, session_id="mine", episode_id="e-1") as team:
        assert team.session_ids == ("mine-planner", "mine-coder")
        variables = team["coder"].variables
        assert variables["OPENAI_BASE_URL"] == team["coder"].base_url and variables["ANTHROPIC_AUTH_TOKEN"] is None
        assert team["coder"].root_url.endswith("@coder") and team["coder"].headers == {"x-tokengrove-agent": "coder"}
        await play(team["planner"])
    for name, agent in zip(team.session_ids, AGENTS, strict=True):
        tree = await client.session_tree(name)
        assert (tree.status, tree.outcome) == ("ended", None)
        entry = next(each for each in await client.sessions() if each["session_id"] == name)
        assert entry["metadata"] == {"episode": "e-1", "agent": agent}
    with pytest.raises(InvalidRequest, match="the team has no agent 'tester'; it has planner, coder"):
        await team.end({"tester": 1.0})


async def test_a_team_plays_in_process(tmp_path: Path) -> None:
    settings = Settings(engine="scripted", engine_arg=("tokens=4",), database_url=default_url(tmp_path))
    with shared_renderer(settings):
        app = build_app(settings)
        async with AsyncClient(app=app) as client, Team(client, "pair", AGENTS, shared=True) as team:
            for member in team.members:
                openai = AsyncOpenAI(base_url=member.base_url, api_key=member.api_key, http_client=client.http_client())
                async with openai:
                    await openai.chat.completions.create(model="any", messages=[user("Begin.")])
            await team.end({"coder": 1.0})
            export = await team.export()
    assert [(sample.agent, sample.reward, sample.rewarded) for sample in export.samples] == [
        ("planner", 0.0, False), ("coder", 1.0, True),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("agents", "options", "said"),
    [
        ([], {}, "at least one agent"),
        ("coder", {}, "must be a list"),
        (["a", "a"], {}, "the same name"),
        (["a/b"], {}, "'a/b' is not a valid name of an agent"),
        (["a~b"], {}, "is not a valid name"),
        (["a", "b"], {"api_key": "sk-chosen"}, "'api_key' can belong to one session only"),
        (["a"], {"metadata": {"episode": 1}}, "'metadata.episode' is set by the team"),
    ],
)
def test_what_no_team_can_be_made_of_is_refused(agents: Any, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Team(AsyncClient("http://127.0.0.1:9"), "task", agents, **options)


def test_an_agent_is_known_after_the_start_only() -> None:
    team = Team(AsyncClient("http://127.0.0.1:9"), "task", AGENTS)
    assert team.members == () and team.session_ids == ()
    with pytest.raises(ValueError, match="has not started"):
        team["coder"]


async def test_a_group_of_separate_sessions_is_whole_when_every_episode_has_ended(client: AsyncClient) -> None:
    mine = {"group_id": "two-episodes"}
    for claimable in (0, 4):
        async with Team(client, "pair", AGENTS, group_id="two-episodes", group_size=2) as team:
            await asyncio.gather(*(play(team[name], 1) for name in AGENTS))
            await team.end(1.0)
        assert len((await client.claim(limit=10, filter=mine)).sessions) == claimable


async def test_a_member_has_the_key_of_an_agent_only(client: AsyncClient) -> None:
    async with Team(client, "pair", AGENTS) as team:
        for member in team.members:
            assert (member.api_key, member.variables["OPENAI_API_KEY"]) == (member.session.api_key,) * 2
            assert member.api_key != member.session.control_key
