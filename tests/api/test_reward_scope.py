"""How a session's score is decided: by its start, its end, the export, or the times of its answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support import Server, says, serving, until, user

CHAT = "/v1/chat/completions"


async def observed(server: Server, *observations: str, session: str = "s") -> list[str]:
    """Turns of an agent without memory, one after the other; their ids."""
    return [
        (await server.ok(f"/{session}{CHAT}", {"model": "m", "messages": [user(text)]}))["id"] for text in observations
    ]


async def exported(server: Server, session: str = "s", **options: Any) -> tuple[dict[str, Any], list[float]]:
    """The entry of the session and the rewards of its samples."""
    body = await server.ok("/trajectories/export", {"session_id": session, "layout": "concat", **options})
    [entry] = body["sessions"]
    return entry, [sample["rewards"][0] for sample in body["samples"]]


async def test_an_observation_that_repeats_does_not_change_the_score_of_step_scores(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 6)) as server:
        for session, seen in (("plain", ("a", "b", "c")), ("walls", ("a", "wall", "wall"))):
            await observed(server, *seen, session=session)
            await server.ok(f"/{session}/rl/set_reward", {"step_scores": [1, 1, 1]})
        found = {session: await exported(server, session) for session in ("plain", "walls")}
        assert [(entry["score"], entry["reward_scope"]) for entry, _ in found.values()] == [(3.0, "session")] * 2
        assert [rewards for _, rewards in found.values()] == [[3.0] * 3] * 2
        assert found["plain"][0]["warnings"] == []
        [told] = found["walls"][0]["warnings"]
        assert "'reward_scope': path" in told


async def test_advantages_of_an_episode_that_observed_the_same_twice_are_those_of_its_like(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 6)) as server:
        for session, seen in (("plain", ("a", "b", "c")), ("walls", ("a", "wall", "wall"))):
            await server.ok("/rl/start_session", {"session_id": session, "group_id": "g"})
            await observed(server, *seen, session=session)
            await server.ok(f"/{session}/rl/end_session", {"step_scores": [1, 1, 1], "outcome": "Finished"})
        body = await server.ok("/trajectories/export", {"filter": {"group_id": "g"}, "advantages": "leave_one_out"})
        assert [sample["advantages"] for sample in body["samples"]] == [[0.0]] * 6


async def test_answers_to_one_prompt_that_overlapped_are_alternatives(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        await server.ok("/engine/pause_generation", {"mode": "in_place"})
        body = {"model": "m", "messages": [user("one")]}
        asked = [asyncio.create_task(server.ok(f"/s{CHAT}", body)) for _ in range(2)]
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 2)
        await server.ok("/engine/continue_generation", {})
        ids = [reply["id"] for reply in await asyncio.gather(*asked)]
        await server.ok("/s/rl/set_reward", {"rewards": dict(zip(ids, (1.0, 0.0), strict=True))})
        entry, rewards = await exported(server)
        assert (entry["reward_scope"], entry["score"], sorted(rewards)) == ("path", 0.5, [0.0, 1.0])
        assert "overlapped" in entry["warnings"][0]


async def test_choices_of_one_request_are_alternatives_without_a_warning(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        await server.ok(f"/s{CHAT}", {"model": "m", "n": 2, "messages": [user("one")]})
        await server.ok("/s/rl/set_reward", {"step_scores": [1.0, 0.0]})
        entry, rewards = await exported(server)
        assert (entry["reward_scope"], rewards, entry["warnings"]) == ("path", [1.0, 0.0], [])


async def test_the_scope_of_the_start_scores_the_session_and_that_of_the_export_comes_first(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "reward_scope": "path"})
        await observed(server, "one", "one")
        await server.ok("/s/rl/set_reward", {"step_scores": [1.0, 0.0]})
        entry, rewards = await exported(server)
        assert (entry["reward_scope"], rewards, entry["warnings"]) == ("path", [1.0, 0.0], [])
        assert (await server.http.get("/rl/sessions/s")).json()["reward_scope"] == "path"
        entry, rewards = await exported(server, reward_scope="session")
        assert (entry["reward_scope"], rewards) == ("session", [1.0, 1.0])


async def test_the_score_of_the_end_is_that_of_every_sample_and_stays_when_the_end_is_repeated(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 3)) as server:
        await server.ok("/rl/start_session", {"session_id": "s"})
        await observed(server, "a", "b", "c")
        end = {"score": 5, "step_scores": [1, 2, 0], "outcome": "Finished"}
        for _ in range(2):
            await server.ok("/s/rl/end_session", end)
        other = await server.post("/s/rl/end_session", {**end, "score": 6})
        assert (other.status_code, other.json()["error"]["param"]) == (409, "score")
        assert "'reward_name'" in other.json()["error"]["message"]
        entry, rewards = await exported(server)
        assert (entry["score"], entry["episode_score"], rewards) == (5.0, 5.0, [5.0] * 3)
        assert [node["reward"] for node in await server.tree()] == [1.0, 2.0, 0.0]
        entry, rewards = await exported(server, reward_scope="path")
        assert (entry["episode_score"], rewards) == (5.0, [1.0, 2.0, 0.0])


async def test_a_score_alone_is_also_the_reward_of_the_last_main_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "discount": 0.5, "credit": "linear"})
        await observed(server, "a", "b")
        await server.ok("/s/rl/end_session", {"score": 4})
        assert [(node["reward"], node["return"]) for node in await server.tree()] == [(None, 2.0), (4.0, 4.0)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rl/start_session", {"task_id": "t", "reward_scope": "turn"}, "reward_scope"),
        ("/s/rl/end_session", {"score": "5"}, "score"),
        ("/s/rl/end_session", {"score": 1e31}, "score"),
        ("/s/rl/end_session", {"score": True}, "score"),
    ],
)
async def test_a_scope_or_score_of_another_kind_is_refused(
    tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with serving(tmp_path, says("ok")) as server:
        await observed(server, "a")
        reply = await server.post(path, body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


async def test_answers_one_after_the_other_beside_choices_warn_that_both_readings_are_possible(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["ok"] * 4)) as server:
        await server.ok(f"/s{CHAT}", {"model": "m", "n": 2, "messages": [user("one")]})
        await observed(server, "wall", "wall")
        await server.ok("/s/rl/set_reward", {"step_scores": [1.0, 0.0, 1.0, 1.0]})
        entry, _ = await exported(server)
        [told] = entry["warnings"]
        assert entry["reward_scope"] == "path"
        assert "one after the other" in told and "'reward_scope': session" in told
        assert (await exported(server, reward_scope="session"))[0]["warnings"] == []


async def test_a_named_reward_takes_the_place_of_the_score_of_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok", "ok")) as server:
        await server.ok("/rl/start_session", {"session_id": "s"})
        await observed(server, "a", "b")
        await server.ok("/s/rl/end_session", {"score": 5})
        await server.ok("/s/rl/set_reward", {"turn": 1, "reward": 7.0, "name": "verified"})
        assert (await exported(server))[1] == [5.0, 5.0]
        entry, rewards = await exported(server, reward_name="verified")
        assert (entry["score"], rewards) == (7.0, [7.0, 7.0])
