"""GET /rl/statistics: what the server does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.sessions import recent_rewards
from proxy.telemetry.history import EVERY_S, History
from tests.support import Server, sampled, says, serving, user

ADMIN = {"authorization": "Bearer the-admin-key"}


async def statistics(server: Server, **query: Any) -> Any:
    """The statistics of this moment, whatever was asked a moment before."""
    for route in server.app.routes:
        if getattr(route, "path", "") == "/rl/statistics":
            route.endpoint.__self__._statistics._read_at = float("-inf")  # type: ignore[attr-defined]
            route.endpoint.__self__._statistics._rewards.__self__._again_at = float("-inf")  # type: ignore[attr-defined]
    response = await server.http.get("/rl/statistics", params=query)
    assert response.status_code == 200, response.text
    return response.json()


async def rewards_of(server: Server, *, sessions: int) -> Any:
    """The mean rewards, once they are of so many sessions: who asks is told what was read before."""
    for _ in range(6000):
        found = (await statistics(server))["rewards"]
        if found["sessions"] == sessions:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError("the sessions were not read within a minute")


async def test_turns_forks_tokens_and_failures_are_counted_by_kind(tmp_path: Path) -> None:
    replies = [Reply(sampled("one")), Reply(sampled("two")), Reply(sampled("three"), fault=Fault.ERROR)]
    async with serving(tmp_path, play(replies)) as server:
        first = await server.answer([user("a")])
        await server.chat([user("b")])
        assert (await server.post("/s/v1/chat/completions", {"messages": []})).status_code == 400
        await server.post("/s/v1/chat/completions", {"messages": [user("a"), first, user("c")]})
        said = await statistics(server)
        assert said["turns"] == {"complete": 2, "failed": 1, "aborted": 0}
        assert {name: count for name, count in said["reasons"].items() if count} == {"first": 1, "new_root": 1}
        assert said["errors"] == {"invalid_request": 1, "engine_failed": 1}
        assert said["tokens"]["output"] == len(sampled("one")) + len(sampled("two"))
        assert said["first_token_s"]["count"] == 2 == sum(said["first_token_s"]["counts"])
        assert said["session_counts"]["started"] == said["sessions"]["active"] == 1
        assert (said["engine"]["name"], said["engine"]["paused"], said["servers"]) == ("scripted", None, None)


async def test_the_history_has_what_was_counted_in_five_seconds_and_the_rates_are_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sample of the server's own, taken meanwhile on a busy machine, would be later than those of the test.
    monkeypatch.setattr(History, "run", lambda self: asyncio.Event().wait())
    async with serving(tmp_path, says("one", "two")) as server:
        now = (await statistics(server))["at"]
        history = server.app.state.metrics.history
        history.take(now - 2 * EVERY_S)
        for text in ("a", "b"):
            await server.chat([user(text)])
        history.take(now - EVERY_S)
        said = await statistics(server)
        assert said["history"]["every_s"] == EVERY_S
        assert said["history"]["turns_per_s"][-2:] == [0.0, 2 / EVERY_S]
        assert said["history"]["forks_per_s"][-1] == 0, "a conversation of its own is no fork, as in a summary"
        assert said["history"]["first_token_p50_s"][-2] is None
        assert 0 < said["history"]["first_token_p50_s"][-1] <= said["history"]["first_token_p95_s"][-1]
        lengths = {name: len(values) for name, values in said["history"].items() if isinstance(values, list)}
        assert set(lengths.values()) == {len(said["history"]["at"])}
        assert said["rates"]["turns_per_s"] == pytest.approx(2 / said["rates"]["over_s"])
        assert (await statistics(server, history_s=0))["history"]["at"] == []


async def test_rewards_are_means_of_the_sessions_that_ended_last_by_their_weights(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["x"] * 6)) as server:
        assert (await statistics(server))["rewards"]["by_version"] == []
        rewards: list[float | None] = [1.0, 0.0, None, 0.5]
        for number, reward in enumerate(rewards):
            if number == 3:
                await server.ok("/engine/update_weights", {"path": "w", "version": 7})
            await server.chat([user("a")], session=f"s{number}")
            if reward is not None:
                await server.ok(f"/s{number}/rl/set_reward", {"reward": reward})
            await server.ok(f"/s{number}/rl/end_session", {})
        await server.chat([user("a")], session="live")
        await server.ok("/live/rl/set_reward", {"reward": 9.0})
        found = await rewards_of(server, sessions=4)
        assert found["rewarded"] == 3
        assert (await statistics(server))["engine"]["version"] == 7
        assert found["by_version"] == [
            {"version": 0, "sessions": 2, "mean": 0.5},
            {"version": 7, "sessions": 1, "mean": 0.5},
        ]
        assert sum(period["sessions"] for period in found["over_time"]) == 3


async def test_of_very_many_sessions_the_rewards_are_of_those_that_ended_last(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_rewards, "MOST_SESSIONS", 1)
    async with serving(tmp_path, says("x", "x"), database_url=database_url) as server:
        for name in ("first", "second"):
            await server.chat([user("a")], session=name)
        for name, reward in (("second", 0.25), ("first", 0.75)):
            await server.ok(f"/{name}/rl/end_session", {"reward": reward})
        found = await rewards_of(server, sessions=1)
        assert found["by_version"] == [{"version": 0, "sessions": 1, "mean": 0.75}]


async def test_rewards_leave_out_sessions_that_validate(tmp_path: Path) -> None:
    async with serving(tmp_path, says("x", "x")) as server:
        for name, validates, reward in [("trained", False, 0.25), ("measured", True, 1.0)]:
            await server.ok("/rl/start_session", {"session_id": name, "metadata": {"validate": validates}})
            await server.chat([user("a")], session=name)
            await server.ok(f"/{name}/rl/end_session", {"reward": reward})
        found = await rewards_of(server, sessions=1)
        assert found["by_version"] == [{"version": 0, "sessions": 1, "mean": 0.25}]
        assert [(period["sessions"], period["mean"]) for period in found["over_time"]] == [(1, 0.25)]


async def test_who_asks_again_within_a_second_gets_the_same_numbers(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one")) as server:
        first = await statistics(server)
        await server.chat([user("a")])
        again = (await server.http.get("/rl/statistics")).json()
        assert (again["at"], again["turns"]) == (first["at"], first["turns"])


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/rl/statistics?history_s=x", "history_s"),
        ("/rl/statistics?history_s=-1", "history_s"),
        ("/rl/statistics?history_s=nan", "history_s"),
        ("/rl/statistics?since=5", "since"),
        ("/rl/events?events=turns", "events"),
        ("/rl/events?events=", "events"),
        ("/rl/events?only=sessions", "only"),
    ],
)
async def test_a_wrong_parameter_is_named(tmp_path: Path, path: str, param: str) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.http.get(path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/rl/statistics", "/rl/events"])
async def test_only_the_administrator_may_look(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says(), admin_key="the-admin-key") as server:
        assert (await server.http.get(path)).status_code == 401
        assert (await server.http.get(path, headers={"authorization": "Bearer other"})).status_code in (401, 403)
        assert (await server.http.get("/rl/statistics", headers=ADMIN)).status_code == 200
