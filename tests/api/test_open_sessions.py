"""On an open server without a session in the path: whose session a turn is, what follows its end, and its rewards."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.scripted.scripts import Reply, Script
from proxy.store.pruning import prune
from tests.databases import execute
from tests.support import Server, sampled, serving, user
from tests.wide import CROSSED

RETRY = {"x-stainless-retry-count": "1"}
TURN = "/v1/chat/completions"
HI = {"model": "m", "messages": [user("hi")]}


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def speak(server: Server, key: str | None = None, text: str = "hi", **more: Any) -> httpx.Response:
    headers = {**bearer(key), **more.pop("headers", {})}
    body = {"model": "m", "messages": [user(text)], **more}
    return await server.post(TURN, body, headers=headers)


async def said(server: Server, key: str | None = None, text: str = "hi", **more: Any) -> str:
    response = await speak(server, key, text, **more)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def end(server: Server, key: str | None = None) -> Any:
    return await server.ok("/rl/end_session", {}, headers=bearer(key))


async def sessions(server: Server) -> list[str]:
    entries = (await server.http.get("/rl/sessions")).json()["sessions"]
    return [entry["session_id"] for entry in entries]


async def holder(server: Server, interaction_id: str) -> str:
    """The session that a turn was recorded in."""
    for session in await sessions(server):
        if interaction_id in [node["id"] for node in await server.tree(session)]:
            return session
    raise AssertionError(f"no session has {interaction_id}")


async def test_each_unknown_key_has_a_session_of_its_own_and_no_key_is_default(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        turns = [await said(server, key) for key in ("one", "two", "one", None)]
        first, second, again, bare = [await holder(server, turn) for turn in turns]
    assert first == again and len({first, second, bare}) == 3 and bare == "default"
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await holder(server, await said(server, "one")) == first
        assert await holder(server, (await speak(server, headers={"x-api-key": "two"})).json()["id"]) == second


async def test_an_unknown_key_is_in_no_name_reply_or_row(tmp_path: Path) -> None:
    key = "sk-a-real-secret-of-another-service"
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with serving(tmp_path, always(), database_url=url) as server:
        response = await speak(server, key)
        [name] = await sessions(server)
        shown = await server.http.get(f"/rl/sessions/{name}")
        await end(server, key)
        refused = await server.post("/rl/set_reward", {"reward": "x"}, headers=bearer(key))
    digest = hashlib.sha256(key.encode()).hexdigest()
    texts = [name, shown.text, response.text, refused.text, *map(str, (response.headers, refused.headers))]
    stored = (tmp_path / "test.db").read_bytes()
    assert name.encode() in stored
    for secret in (key, digest, digest[:8]):
        assert not [text for text in texts if secret in text] and secret.encode() not in stored


async def test_a_path_comes_first_then_an_issued_key_then_a_hint_then_an_unknown_key(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"})
        hint = {"x-session-id": "hinted"}
        mine, other = bearer(started["api_key"]), bearer("unknown")
        for path, headers, session in (
            ("/named", {**mine, **hint}, "named"),
            ("", {**mine, **hint}, "t-0"),
            ("", {**other, **hint}, "hinted"),
            ("", hint, "hinted"),
        ):
            reply = await server.ok(path + TURN, HI, headers=headers)
            assert await holder(server, reply["id"]) == session
        by_field = await said(server, "unknown", prompt_cache_key="field")
        assert await holder(server, by_field) == "field"
        assert (await holder(server, await said(server, "unknown"))).startswith("key-")


@CROSSED
@pytest.mark.parametrize("key", [None, "unknown"])
async def test_after_an_end_the_next_turn_opens_the_next_session(
    tmp_path: Path, database_url: str, key: str | None
) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        name = await holder(server, await said(server, key))
        for number in range(2):
            await end(server, key)
            assert await holder(server, await said(server, key)) == f"{name}-{number + 1}"
        assert await holder(server, await said(server, key)) == f"{name}-2"
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await holder(server, await said(server, key)) == f"{name}-2"
        await end(server, key)
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await holder(server, await said(server, key)) == f"{name}-3"
        assert [len(await server.tree(each)) for each in (name, f"{name}-1", f"{name}-2")] == [1, 1, 3]
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert {entry["task_id"] for entry in listed} == {name}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_names_its_session_to_who_did_not(tmp_path: Path, stream: bool) -> None:
    async with serving(tmp_path, always()) as server:
        more: dict[str, Any] = {"stream": True} if stream else {}
        assert (await speak(server, **more)).headers["x-tokengrove-session"] == "default"
        hinted = await speak(server, prompt_cache_key="größe", **more)
        assert hinted.headers["x-tokengrove-session"] == "gr%C3%B6%C3%9Fe"
        mine = await speak(server, "unknown", **more)
        named = mine.headers["x-tokengrove-session"]
        assert named.startswith("key-") and await sessions(server) == ["default", "größe", named]
        await end(server, "unknown")
        after = await speak(server, "unknown", "another", **more)
        assert after.headers["x-tokengrove-session"] == f"{named}-1"
        retried = await speak(server, "unknown", headers=RETRY, **more)
        assert retried.headers["x-tokengrove-session"] == named
        by_path = await server.post(f"/named{TURN}", {**HI, **more})
        assert "x-tokengrove-session" not in by_path.headers


async def test_a_named_session_stays_closed_after_its_end(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for headers, path in (({"x-session-id": "hinted"}, ""), ({}, "/größe"), ({}, "/default")):
            await server.ok(path + TURN, HI, headers=headers)
            ended = await server.post(f"{path}/rl/end_session", {}, headers=headers)
            assert ended.status_code == 200
            closed = await server.post(path + TURN, HI, headers=headers)
            assert (closed.status_code, closed.json()["error"]["code"]) == (403, "session_closed")


async def test_an_expired_default_session_is_followed_too(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        await said(server)
    execute(database_url, "UPDATE sessions SET status = 'expired', ended_at = 1.0")
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await server.ok("/rl/set_reward", {"reward": 1.0})
        assert await holder(server, await said(server)) == "default-1"


async def test_a_series_goes_on_when_earlier_sessions_of_it_were_pruned(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        await said(server)
        await end(server)
        await said(server)
        await server.ok("/export_trajectories", {"session_id": "default"})
    execute(database_url, "UPDATE sessions SET ended_at = 1.0 WHERE session_id = 'default'")
    assert prune(database_url, 1.0, dry_run=False).sessions == 1
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await holder(server, await said(server)) == "default-1"
        await end(server)
        assert await said(server, text="a retry of what is gone", headers=RETRY)
        assert await sessions(server) == ["default-1", "default-2"]


@pytest.mark.parametrize("taken", ["path", "start", "task"])
async def test_a_callers_own_session_of_that_name_is_passed_over(tmp_path: Path, taken: str) -> None:
    async with serving(tmp_path, always()) as server:
        await said(server)
        await end(server)
        if taken == "path":
            await server.ok(f"/default-1{TURN}", {"model": "m", "messages": [user("mine")]})
        elif taken == "start":
            await server.ok("/rl/start_session", {"session_id": "default-1"})
        else:
            started = await server.ok("/rl/start_session", {"task_id": "default"})
            assert started["session_id"] == "default-1"
        assert await holder(server, await said(server)) == "default-2"
        assert await holder(server, await said(server)) == "default-2"


async def test_many_sessions_of_a_task_of_that_name_are_passed_over_in_few_steps(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await said(server)
        await end(server)
        for _ in range(20):
            await server.ok("/rl/start_session", {"task_id": "default"})
        server.forget_sessions()
        turn = await said(server)
        loaded = [n for n in range(100) if server.app.state.registry.find(f"default-{n}") is not None]
        assert await holder(server, turn) == "default-32" and loaded == [1, 2, 4, 8, 16, 32]
        await end(server)
        assert await holder(server, await said(server)) == "default-33"


async def test_more_keys_than_are_remembered_keep_their_sessions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.sessions.session_series._MAX_REMEMBERED", 1)
    monkeypatch.setattr("proxy.sessions.keys._MAX_REMEMBERED", 1)
    async with serving(tmp_path, always()) as server:
        for _ in range(2):
            names = [await holder(server, await said(server, key)) for key in ("one", "two", None)]
            for key in ("one", "two", None):
                await end(server, key)
        assert [name.rpartition("-")[2] for name in names] == ["1", "1", "1"]
        server.forget_sessions()
        assert await holder(server, await said(server)) == "default-2"


async def test_turns_at_one_moment_open_one_session(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await said(server)
        await end(server)
        turns = await asyncio.gather(*(said(server, text=f"turn {n}") for n in range(8)))
        assert {await holder(server, turn) for turn in turns} == {"default-1"}
        assert await sessions(server) == ["default", "default-1"]


@CROSSED
@pytest.mark.parametrize("key", [None, "unknown"])
@pytest.mark.parametrize("opened", [False, True])
async def test_a_retry_of_an_ended_sessions_turn_gets_its_reply_again(
    tmp_path: Path, database_url: str, key: str | None, opened: bool
) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        marked = await said(server, key, "marked")
        keyed = await said(server, key, "keyed", headers={"idempotency-key": "k"})
        name = await holder(server, marked)
        await end(server, key)
        if opened:
            await said(server, key, "another")
        for _ in range(2):
            assert await said(server, key, "marked", headers=RETRY) == marked
            assert await said(server, key, "keyed", headers={"idempotency-key": "k"}) == keyed
            server.forget_sessions()
        assert await sessions(server) == [name, f"{name}-1"][: 1 + opened]
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await said(server, key, "marked", headers=RETRY) == marked
        # The other ways to address it replay as they did: a closed session takes no request.
        if not opened:
            assert await end(server, key) == {"interaction_count": 2}
        assert (await server.ok("/rl/set_reward", {"reward": 1.0}, headers=bearer(key)))["interaction_ids"]
        assert len(server.engine.requests) == 0


async def test_a_retry_over_responses_that_names_an_ended_response_replays(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        first = await server.ok("/v1/responses", {"model": "m", "input": "one"})
        body = {"model": "m", "input": "two", "previous_response_id": first["id"]}
        second = await server.ok("/v1/responses", body)
        await end(server)
        assert (await server.ok("/v1/responses", body, headers=RETRY))["id"] == second["id"]
        gone = await server.post("/v1/responses", {**body, "input": "three"})
        assert gone.json()["error"]["code"] == "previous_response_not_found"


async def test_what_was_first_asked_after_the_end_is_no_retry_of_the_ended_session(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), max_turns_in_flight=1) as server:
        before = await said(server)
        await end(server)
        assert (await speak(server, n=2)).status_code == 429  # another request, refused before it was sampled
        assert await said(server, headers=RETRY) == before
        server.app.state.turns.running._arriving = 1
        assert (await speak(server)).status_code == 429
        server.app.state.turns.running._arriving = 0
        after = await said(server, headers=RETRY)
        assert after != before and await holder(server, after) == "default-1"
        assert await said(server, headers=RETRY) == after


@CROSSED
@pytest.mark.parametrize("key", [None, "unknown"])
async def test_rewards_marks_and_ends_find_the_session_of_the_turns_also_after_its_end(
    tmp_path: Path, database_url: str, key: str | None
) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        missing = await server.post("/rl/set_reward", {"reward": 1.0}, headers=bearer(key))
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "session_not_found")
        assert await sessions(server) == []
        turn = await said(server, key)
        asked = {"headers": bearer(key)}
        assert await server.ok("/rl/set_reward", {"reward": 1.0}, **asked) == {"interaction_ids": [turn]}
        ended = await server.post("/rl/end_session", {"reward": 2.0}, **asked)
        assert ended.json() == {"interaction_count": 1}
        assert ended.headers["x-tokengrove-session"] == await holder(server, turn)
        assert await server.ok("/rl/set_reward", {"reward": 3.0, "interaction_id": turn}, **asked)
        assert await server.ok("/rl/mark", {"interaction_id": turn, "trainable": False}, **asked)
        assert await server.ok("/rl/end_session", {}, **asked) == {"interaction_count": 1}
    async with serving(tmp_path, always(), database_url=database_url) as server:
        assert await server.ok("/rl/set_reward", {"reward": 4.0}, **asked) == {"interaction_ids": [turn]}
        name = await holder(server, turn)
        [node] = await server.tree(name)
        assert (node["reward"], node["trainable"]) == (4.0, False)
        after = await said(server, key)
        assert await server.ok("/rl/set_reward", {"reward": 5.0}, **asked) == {"interaction_ids": [after]}
        late = {"reward": 6.0, "interaction_id": turn}
        assert await server.ok("/rl/set_reward", late, **asked) == {"interaction_ids": [turn]}
        assert await server.ok("/rl/mark", {"interaction_id": turn, "trainable": True}, **asked)
        assert [node["reward"] for node in await server.tree(name)] == [6.0]
        # Whoever names another session does not reach it; nor does another key.
        for path, key_of_another in ((f"/{name}-1", key), ("", "another")):
            await speak(server, "another")
            other = await server.post(f"{path}/rl/set_reward", late, headers=bearer(key_of_another))
            assert (other.status_code, other.json()["error"]["code"]) == (404, "not_found")
        assert await server.ok("/rl/end_session", {}, **asked) == {"interaction_count": 1}


async def test_an_issued_key_stays_closed_after_the_end_and_refused_after_a_rotation(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, always(), database_url=database_url) as server:
        ended = await server.ok("/rl/start_session", {"task_id": "t", "api_key": "17"})
        rotated = await server.ok("/rl/start_session", {"task_id": "t", "api_key": "18"})
        await said(server, rotated["api_key"])
        await server.ok("/rl/end_session", {}, headers=bearer("17"))
        new = await server.ok("/t-1/rl/rotate_keys", {})
    async with serving(tmp_path, always(), database_url=database_url) as server:
        for key in ("17", ended["control_key"]):
            closed = await speak(server, key, headers={"x-session-id": "hinted"})
            assert (closed.status_code, closed.json()["error"]["code"]) == (403, "session_closed")
        for key in ("18", rotated["control_key"]):
            for path, body in ((TURN, HI), ("/rl/set_reward", {"reward": 1}), ("/rl/mark", {})):
                refused = await server.post(path, body, headers={**bearer(key), "x-session-id": "hinted"})
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
            assert (await server.post("/v1/generate", {"input_ids": [1]}, headers=bearer(key))).status_code == 401
        path = rotated["root_url"].removeprefix("http://t") + TURN
        assert (await server.post(path, HI)).status_code == 401
        assert await holder(server, await said(server, new["api_key"])) == "t-1"
        assert await sessions(server) == ["t-0", "t-1"]
        # A key that is chosen again is the next session's.
        await server.ok("/rl/start_session", {"session_id": "next", "api_key": "18"})
        assert await holder(server, await said(server, "18")) == "next"


async def test_a_key_that_a_session_is_started_with_leaves_its_own_session(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        before = await holder(server, await said(server, "17"))
        await server.ok("/rl/start_session", {"session_id": "s", "api_key": "17"})
        assert before != "s" and await holder(server, await said(server, "17")) == "s"


async def test_generate_with_an_unknown_key_is_not_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await server.ok("/v1/generate", {"input_ids": [1, 2]}, headers=bearer("unknown"))
        assert await sessions(server) == []


async def test_with_rewards_by_control_whoever_starts_a_session_gets_its_control_key(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), rewards_by="control") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"})
        await said(server, started["api_key"])
        for key, status in ((None, 404), ("unknown", 404), (started["api_key"], 403), (started["control_key"], 200)):
            response = await server.post("/rl/set_reward", {"reward": 1.0}, headers=bearer(key))
            assert response.status_code == status, response.text
        assert await end(server, started["control_key"]) == {"interaction_count": 1}


@CROSSED
@pytest.mark.parametrize("key", [None, "unknown"])
async def test_with_rewards_by_control_a_session_that_began_with_a_turn_says_how_to_reward(
    tmp_path: Path, database_url: str, key: str | None
) -> None:
    async with serving(tmp_path, always(), rewards_by="control", database_url=database_url) as server:
        turn = await said(server, key)
        for path in ("/rl/set_reward", "/rl/end_session", "/rl/rotate_keys"):
            refused = await server.post(path, {}, headers=bearer(key))
            assert refused.status_code == 401
            assert "POST /rl/start_session" in refused.json()["error"]["message"]
        assert (await server.tree(await holder(server, turn)))[0]["reward"] is None
    async with serving(tmp_path, always(), database_url=database_url) as server:  # nothing is lost
        assert await server.ok("/rl/set_reward", {"reward": 1.0}, headers=bearer(key)) == {"interaction_ids": [turn]}
