"""Several agents in one session: who names a turn's agent, and rewards, exports and advantages by agent."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from tests.support import Server, assistant, function_tool, sampled, says, serving, system, user

ADMIN = {"authorization": "Bearer admin"}
AGENTS = ("planner", "coder")


async def turn(server: Server, agent: str | None, text: str, *history: Any, session: str = "s", **more: Any) -> str:
    """A turn of an agent with its own system prompt; returns its id."""
    headers = {"x-tokengrove-agent": agent} if agent else {}
    body = {"model": "m", "messages": [system(f"You are {agent}."), *history, user(text)], **more}
    reply: str = (await server.ok(f"/{session}/v1/chat/completions", body, headers=headers))["id"]
    return reply


async def episode(server: Server, session: str = "s") -> list[str]:
    """planner, coder, planner again, coder again; the ids of their turns. The planner's second turn has no parent."""
    first = [await turn(server, agent, "one", session=session) for agent in AGENTS]
    again = [assistant("ok"), user("two")]
    return first + [
        await turn(server, agent, "three", user("one"), *again, assistant("ok"), session=session) for agent in AGENTS
    ]


async def rewards(server: Server, session: str = "s") -> list[float | None]:
    return [node["reward"] for node in await server.tree(session)]


async def test_a_reward_goes_to_the_last_turn_of_the_agent_that_it_names(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 5)) as server:
        ids = await episode(server)
        await turn(server, None, "hello")
        assert await server.ok("/s/rl/set_reward", {"reward": 1, "agent": "planner"}) == {"interaction_ids": [ids[2]]}
        assert await server.ok("/s/rl/set_reward", {"reward": 0.5, "agent": "coder"}) == {"interaction_ids": [ids[3]]}
        style = {"reward": 0.2, "name": "style", "agent": "planner"}
        assert await server.ok("/s/rl/set_reward", style) == {"interaction_ids": [ids[2]]}
        assert await rewards(server) == [None, None, 1.0, 0.5, None]
        await server.ok("/s/rl/set_reward", {"step_scores": [0.1, 0.2], "agent": "coder"})
        assert await rewards(server) == [None, 0.1, 1.0, 0.2, None]
        await server.ok("/s/rl/set_reward", {"step_scores": [7], "align": "first", "agent": "coder"})
        await server.ok("/s/rl/set_reward", {"reward": 3, "turn": 0, "agent": "planner"})
        tree = await server.tree()
        assert [node["reward"] for node in tree] == [3.0, 7.0, 1.0, 0.2, None] and tree[2]["rewards"] == {"style": 0.2}
        tokens = [0.5] * len(sampled("ok"))
        done = await server.ok("/s/rl/set_reward", {"token_rewards": tokens, "agent": "coder"})
        assert done == {"interaction_ids": [ids[3]]}


async def test_an_agents_title_call_does_not_get_its_reward(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 3)) as server:
        tools = {"tools": [function_tool("run")]}
        work = await turn(server, "coder", "fix it", **tools)
        await turn(server, "coder", "You are a title generator. Name this.")
        assert await server.ok("/s/rl/set_reward", {"reward": 1, "agent": "coder"}) == {"interaction_ids": [work]}
        headers = {"x-tokengrove-agent": "helper", "x-tokengrove-purpose": "subagent"}
        body = {"model": "m", "messages": [user("help")]}
        help_ = (await server.ok("/s/v1/chat/completions", body, headers=headers))["id"]
        assert await server.ok("/s/rl/set_reward", {"reward": 1, "agent": "helper"}) == {"interaction_ids": [help_]}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"reward": 1, "agent": "codr"}, 404, "it has 'planner' (2 turns), 'coder' (2 turns), 1 turn without an agent"),
        ({"step_scores": [1], "agent": "codr"}, 404, "no complete turn of agent 'codr'"),
        ({"step_scores": [1], "agent": "coder"}, 400, "the 2 complete turns of agent 'coder' in session 's'"),
        ({"reward": 1, "turn": 0, "agent": "coder"}, 400, "'turn' names a turn of agent 'planner', not of 'agent'"),
        ({"reward": 1, "turn": 4, "agent": "coder"}, 400, "'turn' names a turn of no named agent"),
        ({"rewards": {}, "agent": "coder"}, 400, "'agent' applies only with reward or token_rewards or step_scores"),
        ({"agent": "coder"}, 400, "'agent' needs a reward beside it"),
        ({"reward": 1, "agent": 5}, 400, "agent"),
    ],
)
async def test_what_cannot_be_rewarded_by_agent_is_said(
    tmp_path: Path, body: dict[str, Any], status: int, said: str
) -> None:
    async with serving(tmp_path, says(*["ok"] * 5)) as server:
        await episode(server)
        await turn(server, None, "hello")
        for path in ("/s/rl/set_reward", "/s/rl/end_session"):
            response = await server.post(path, body)
            error = response.json()["error"]
            assert (response.status_code, said in error["message"]) == (status, True), response.text
        assert await rewards(server) == [None] * 5


async def test_an_end_rewards_an_agent_and_says_the_same_again(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 4)) as server:
        ids = await episode(server)
        for _ in range(2):
            await server.ok("/s/rl/end_session", {"reward": 1, "agent": "coder", "outcome": "Finished"})
        assert await rewards(server) == [None, None, None, 1.0]
        other = await server.post("/s/rl/end_session", {"reward": 1, "agent": "planner"})
        assert (other.status_code, other.json()["error"]["code"]) == (409, "ended_otherwise")
        assert await server.ok("/s/rl/set_reward", {"reward": 2, "agent": "planner"}) == {"interaction_ids": [ids[2]]}


async def test_an_address_names_its_agent_and_grants_nothing_more(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 6), admin_key="admin") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "a@b"}, headers=ADMIN)
        path = started["root_url"].removeprefix("http://t")
        body = {"model": "m", "messages": [user("hi")]}
        await server.ok(f"{path}@coder/v1/chat/completions", body)
        await server.ok(f"{path}@coder/chat/completions", body, headers={"x-tokengrove-agent": "critic"})
        await server.ok(f"{path}@größe/v1/messages", {**body, "max_tokens": 4})
        await server.ok(f"{path}@coder/v1/completions", {"model": "m", "prompt": "hi"})
        await server.ok(f"{path}@/v1/chat/completions", body)
        await server.ok("/v1/chat/completions", body, headers={"authorization": f"Bearer {started['api_key']}"})
        shown = [await server.http.get(f"/rl/sessions/a@b/interactions/{number}", headers=ADMIN) for number in range(6)]
        assert [each.json()["agent"] for each in shown] == ["coder", "critic", "größe", "coder", None, None]
        for wrong in (f"{path}x@coder", "/a@b~@coder", "/a@b@coder", f"{path[:-22]}{'x' * 22}@coder~{path[-22:]}"):
            refused = await server.post(f"{wrong}/v1/chat/completions", body)
            assert refused.status_code in (401, 404), wrong
        ended = await server.post(f"{path}@coder/rl/end_session", {})
        assert ended.status_code == 403  # as without the name: an agent's address may not end the session


@pytest.mark.parametrize("keys", [{}, {"admin_key": "admin"}], ids=["open", "keyed"])
async def test_the_name_of_an_agent_in_an_address_may_hold_any_sign_but_nul(
    tmp_path: Path, keys: dict[str, str]
) -> None:
    names = ["a~b", "~", "a@b", "a/b", "a b", "%", "~" + "x" * 21]
    async with serving(tmp_path, says(*["ok"] * len(names)), **keys) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s~1@x"}, headers=ADMIN)
        path = started["root_url"].removeprefix("http://t")
        body = {"model": "m", "messages": [user("hi")]}
        for name in names:
            await server.ok(f"{path}@{quote(name, safe='')}/v1/chat/completions", body)
        refused = await server.post(f"{path}@a%00b/v1/chat/completions", body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "agent")
        turns = (await server.http.get("/rl/sessions/s~1@x", headers=ADMIN)).json()["interactions"]
        shown = [
            await server.http.get(f"/rl/sessions/s~1@x/interactions/{turn['id']}", headers=ADMIN) for turn in turns
        ]
        assert [each.json()["agent"] for each in shown] == names
        listed = (await server.http.get("/rl/sessions", headers=ADMIN)).json()["sessions"]
        assert [entry["session_id"] for entry in listed] == ["s~1@x"]


async def test_an_open_server_takes_what_looks_like_an_agent_for_part_of_the_session_id(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "s"})
        path = started["root_url"].removeprefix("http://t")
        body = {"model": "m", "messages": [user("hi")]}
        await server.ok("/s~x@coder/v1/chat/completions", body)
        await server.ok(f"{path}@coder/v1/chat/completions", body)
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [entry["session_id"] for entry in listed] == ["s", "s~x@coder"]
        shown = [await server.http.get(f"/rl/sessions/{name}/interactions/0") for name in ("s", "s~x@coder")]
        assert [each.json()["agent"] for each in shown] == ["coder", None]


async def test_both_agents_are_scored_and_compared_with_their_like(tmp_path: Path) -> None:
    """Four episodes of one group: the planner earns 1, 0, 1, 0 and the coder 4, 4, 8, 0."""
    earned = {"planner": (1.0, 0.0, 1.0, 0.0), "coder": (4.0, 4.0, 8.0, 0.0)}
    async with serving(tmp_path, says(*["ok"] * 16)) as server:
        for number in range(4):
            await server.ok("/rl/start_session", {"task_id": "t", "session_id": f"e{number}", "group_id": "g"})
            await episode(server, f"e{number}")
            for agent in AGENTS:
                await server.ok(f"/e{number}/rl/set_reward", {"reward": earned[agent][number], "agent": agent})
            await server.ok(f"/e{number}/rl/end_session", {})
        how = {"filter": {"group_id": "g"}, "advantages": "leave_one_out"}
        both = await server.ok("/export_trajectories", {**how, "reward_scope": "agent"})
        for agent in AGENTS:
            mine = [sample for sample in both["samples"] if sample["agent"] == agent]
            per_episode = {sample["session_id"]: (sample["rewards"][0], sample["advantages"][0]) for sample in mine}
            values = earned[agent]
            expected = {f"e{n}": (r, pytest.approx(r - (sum(values) - r) / 3)) for n, r in enumerate(values)}
            assert per_episode == expected and {sample["reward_scope"] for sample in mine} == {"agent"}
            alone = await server.ok("/export_trajectories", {**how, "filter": {"group_id": "g", "agent": agent}})
            assert {s["session_id"]: (s["rewards"][0], s["advantages"][0]) for s in alone["samples"]} == expected
        entry = both["sessions"][2]
        assert entry["agent_scores"] == {"planner": 1.0, "coder": 8.0} and entry["group_members"] == 4
        assert entry["score"] == 9.0
        mixed = await server.ok("/export_trajectories", how)
        assert {sample["rewards"][0] for sample in mixed["samples"]} == {5.0, 4.0, 9.0, 0.0}
        claimed = await server.ok(
            "/trajectories/claim",
            {
                **{"limit": 4, "filter": {"group_id": "g", "agent": "coder"}},
                "export": {"advantages": "leave_one_out", "reward_scope": "agent"},
            },
        )
        assert {s["agent"] for s in claimed["samples"]} == {"coder"} and len(claimed["samples"]) >= 4
        found = {s["session_id"]: s["rewards"][0] for s in claimed["samples"]}
        assert found == {f"e{number}": reward for number, reward in enumerate(earned["coder"])}


async def test_an_agent_without_rewards_is_left_out_or_counts_as_0(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 4)) as server:
        await episode(server)
        await server.ok("/s/rl/end_session", {"reward": 1, "agent": "coder"})
        how: dict[str, Any] = {"session_id": "s", "reward_scope": "agent"}
        kept = await server.ok("/export_trajectories", {**how, "unrewarded": "skip"})
        assert {sample["agent"] for sample in kept["samples"]} == {"coder"}
        assert kept["sessions"][0]["agent_scores"] == {"planner": None, "coder": 1.0}
        every = await server.ok("/export_trajectories", how)
        assert {(s["agent"], s["rewards"][0], s["rewarded"]) for s in every["samples"]} == {
            ("planner", 0.0, False), ("coder", 1.0, True),
        }  # fmt: skip
        team = await server.ok("/export_trajectories", {"session_id": "s", "filter": {"agent": "planner"}})
        assert {sample["rewards"][0] for sample in team["samples"]} == {1.0}  # what the session earned is the team's
