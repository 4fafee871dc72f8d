"""`DELETE /rl/sessions/{session}`: nothing of a session stays, in no table, file or memory, on no server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.store.sql.tables import metadata
from tests.api.test_replicas import replicas
from tests.databases import execute
from tests.exports import entries
from tests.mailboxes import posting
from tests.support import Server, sampled, says, serving, until, user
from tests.wide import CROSSED
from tokengrove.client.readers.read import read_page

ADMIN = {"authorization": "Bearer the-admin-key"}
SECRET = "the-word-that-must-go"
HANGS = Reply(sampled("never said"), fault=Fault.HANG, fault_after=1)

UNTOUCHED = ("capacity", "compatibility", "commit_marks")
"""Tables that have nothing of a session."""


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def rows_of(url: str) -> list[Any]:
    """Every row of every table about sessions: not how many count for staleness, nor what the database takes."""
    tables = [table.name for table in metadata.sorted_tables if table.name not in UNTOUCHED]
    return [(table, row) for table in tables for row in execute(url, f"SELECT * FROM {table}")]


async def delete(server: Server, session: str, **headers: str) -> httpx.Response:
    return await server.http.delete(f"/rl/sessions/{session}", headers=headers)


async def full_session(server: Server, name: str) -> None:
    """A session with rows in every table: turns, rewards, keys that were rotated, an end and its returns."""
    await server.ok("/rl/start_session", {"session_id": name, "metadata": {"word": SECRET}})
    first = await server.answer([user(SECRET)], name)
    await server.chat([user(SECRET), first, user(SECRET * 2000)], name)
    await server.ok(f"/{name}/rl/rotate_keys", {})
    await server.ok(f"/{name}/rl/set_reward", {"reward": 1.0, "name": SECRET})
    await server.ok(f"/{name}/rl/end_session", {"reward": 1.0, "exit_reason": SECRET})


async def test_no_row_of_a_deleted_session_stays_but_hashes_of_its_keys(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abcd"), database_url=database_url) as server:
        await full_session(server, "kept")
        kept = rows_of(database_url)
        await full_session(server, "family/of/parts")
        response = await delete(server, "family/of/parts")
        assert (response.status_code, response.json()) == (200, {"interaction_count": 2})
        left = [row for row in rows_of(database_url) if row not in kept]
        assert {table for table, _ in left} == {"withdrawn_keys"}
        assert all(len(row[0]) == 64 and row[1] == "" for _, row in left)
        assert (await delete(server, "family/of/parts")).status_code == 404
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [session["session_id"] for session in listed] == ["kept"]


async def test_no_byte_of_a_deleted_session_stays_in_the_file_or_its_log(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with serving(tmp_path, says(SECRET, SECRET), database_url=url) as server:
        await full_session(server, SECRET)
        files = [tmp_path / name for name in ("grove.db", "grove.db-wal")]
        assert any(SECRET.encode() in path.read_bytes() for path in files)
        assert (await delete(server, SECRET)).status_code == 200
        assert not any(SECRET.encode() in path.read_bytes() for path in files)


async def test_the_id_of_a_deleted_session_begins_a_new_one(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one", "two"), database_url=database_url) as server:
        await server.chat([user("hi")])
        await delete(server, "s")
        headers = {"x-stainless-retry-count": "1"}  # nothing is replayed from the deleted one
        again = await server.ok("/s/v1/chat/completions", {"messages": [user("hi")]}, headers=headers)
        assert again["choices"][0]["message"]["content"] == "two"
        assert [(turn["seq"], turn["reason"]) for turn in await server.tree()] == [(0, "first")]


@CROSSED
@pytest.mark.parametrize("stream", [False, True])
async def test_turns_that_run_are_cancelled_and_leave_nothing(tmp_path: Path, database_url: str, stream: bool) -> None:
    async with serving(tmp_path, play([HANGS]), database_url=database_url) as server:
        body = {"messages": [user("hi")], "stream": stream}
        turn = asyncio.ensure_future(server.post("/s/v1/chat/completions", body))
        await until(lambda: bool(server.engine.requests))
        assert (await delete(server, "s")).status_code == 200
        response = await turn
        assert "session 's' was deleted meanwhile" in response.text
        assert response.status_code == (200 if stream else 404)
        assert not server.app.state.turns.running.busy
        assert rows_of(database_url) == []


async def test_a_waiting_request_of_a_deleted_session_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        await server.chat([user("hi")])
        await server.ok("/engine/pause_generation", {})
        turn = asyncio.ensure_future(server.post("/s/v1/chat/completions", {"messages": [user("more")]}))
        await until(lambda: server.app.state.turns.running.busy)
        await delete(server, "s")
        await server.ok("/engine/continue_generation", {})
        assert (await turn).status_code == 404
        assert len(server.engine.requests) == 1


async def test_the_keys_of_a_deleted_session_open_nothing_on_a_keyed_server(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one"), database_url=database_url, admin_key="the-admin-key") as server:
        keys = await server.ok("/rl/start_session", {"session_id": "s"}, headers=ADMIN)
        path = keys["base_url"].removeprefix("http://t") + "/chat/completions"
        await server.ok(path, {"messages": [user("hi")]})
        for key in ("", keys["api_key"], keys["control_key"]):
            assert (await delete(server, "s", **bearer(key))).status_code in (401, 403)
        assert (await delete(server, "s", **ADMIN)).status_code == 200
        turn = {"messages": [user("hi")]}
        assert (await server.post(path, turn)).status_code == 401
        assert (await server.post("/v1/chat/completions", turn, headers=bearer(keys["api_key"]))).status_code == 401
        assert (await server.post("/s/v1/chat/completions", turn, headers=ADMIN)).status_code == 404
        assert (await server.post("/s/rl/set_reward", {"reward": 1}, headers=ADMIN)).status_code == 404


async def test_an_open_server_takes_no_key_of_a_deleted_session_for_the_name_of_a_new_one(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, says("one"), database_url=database_url) as server:
        old = await server.ok("/rl/start_session", {"session_id": "s"})
        keys = await server.ok("/s/rl/rotate_keys", {})
        await delete(server, "s")
        for each in (old, keys):
            path = each["base_url"].removeprefix("http://t") + "/chat/completions"
            turns = [
                await server.post(path, {"messages": [user("hi")]}),
                await server.post("/v1/chat/completions", {"messages": [user("hi")]}, headers=bearer(each["api_key"])),
            ]
            assert [turn.status_code for turn in turns] == [401, 401]
            assert "deleted" in turns[0].text
        # A caller may still choose this key for a new session.
        await server.ok("/rl/start_session", {"session_id": "t", "api_key": keys["api_key"]})
        await server.ok("/v1/chat/completions", {"messages": [user("hi")]}, headers=bearer(keys["api_key"]))


async def test_a_claim_says_which_of_its_sessions_were_deleted(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one", "two"), database_url=database_url) as server:
        for name in ("a", "b"):
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {})
        await server.ok("/trajectories/claim", {"limit": 2, "claim_id": "trainer"})
        await delete(server, "a")
        again = await server.ok("/trajectories/claim", {"claim_id": "trainer"})
        assert [session["session_id"] for session in again["sessions"]] == ["b"]
        body = {"claim_id": "trainer", "session_ids": ["a", "b"]}
        assert await server.ok("/trajectories/acknowledge", body) == {"acknowledged": ["b"], "lost": {"a": None}}
        await delete(server, "b")
        assert (await server.post("/trajectories/acknowledge", {"claim_id": "trainer"})).status_code == 404
        assert (await server.post("/trajectories/acknowledge", {"session_ids": ["b"]})).status_code == 404


async def test_the_statistics_of_a_group_are_those_of_the_sessions_that_are_left(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abc")) as server:
        for number, name in enumerate("abc"):
            await server.ok("/rl/start_session", {"session_id": name, "group_id": "g"})
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {"reward": float(number)})
        await delete(server, "a")
        body = {"filter": {"group_id": "g"}, "advantages": "leave_one_out", "layout": "concat"}
        told = entries(await server.ok("/trajectories/export", body))
        assert {name: entry["group_members"] for name, entry in told.items()} == {"b": 2, "c": 2}


async def test_a_deleted_live_session_gives_back_its_place_and_its_capacity(tmp_path: Path, database_url: str) -> None:
    options = {"capacity_control": True, "max_live_sessions": 1}
    async with serving(tmp_path, says(), database_url=database_url, **options) as server:
        assert await server.ok("/rl/grant_capacity", {"n": 1}) == {"capacity": 1}
        for _ in range(3):
            await server.ok("/rl/start_session", {"session_id": "s"})
            assert (await server.post("/rl/start_session", {"session_id": "t"})).status_code == 429
            await delete(server, "s")


async def test_ended_sessions_count_for_the_staleness_rule_after_they_were_deleted(
    tmp_path: Path, database_url: str
) -> None:
    options = {"max_staleness": 0, "batch_size": 2}
    async with serving(tmp_path, says("a"), database_url=database_url, **options) as server:
        await server.ok("/rl/start_session", {"session_id": "live"})
        await delete(server, "live")
        await server.ok("/rl/start_session", {"session_id": "s"})
        await server.chat([user("hi")])
        await server.ok("/s/rl/end_session", {})
        await delete(server, "s")
        await server.ok("/rl/start_session", {"session_id": "t"})
        assert (await server.post("/rl/start_session", {"session_id": "u"})).status_code == 429


async def test_a_page_after_a_deleted_session_says_to_begin_again(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        for name in ("a", "b"):
            await server.chat([user("hi")], name)
        cursor = (await server.http.get("/rl/sessions?limit=1")).json()["cursor"]
        await delete(server, cursor)
        response = await server.http.get(f"/rl/sessions?cursor={cursor}")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "cursor")
        assert "begin again" in response.json()["error"]["message"]


async def test_a_series_goes_on_after_its_last_session_was_deleted(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abc")) as server:
        for _ in range(2):
            await server.ok("/v1/chat/completions", {"messages": [user("hi")]})
            await server.ok("/rl/end_session", {})
        await delete(server, "default-1")
        await server.ok("/v1/chat/completions", {"messages": [user("hi")]})
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [session["session_id"] for session in listed] == ["default", "default-1"]


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_another_server_never_mixes_a_deleted_session_with_a_later_one_of_its_id(
    tmp_path: Path, postgres_url: str, turns: int
) -> None:
    scripts = says("old", "new"), says(*(f"new {number}" for number in range(9)))
    async with replicas(tmp_path, postgres_url, *scripts) as (one, two):
        await one.chat([user("hi")])
        assert len(await two.tree()) == 1  # it is in the memory of both
        await delete(one, "s")
        for number in range(turns):  # the later one comes to the same number of turns, and to others
            await (one if number == 0 else two).chat([user(f"another {number}")])
        for server in (two, one):
            tree = await server.tree()
            assert [turn["seq"] for turn in tree] == list(range(turns))
            assert all(turn["parent_id"] is None for turn in tree)
        headers = {"x-stainless-retry-count": "1"}
        retried = await two.ok("/s/v1/chat/completions", {"messages": [user("hi")]}, headers=headers)
        assert retried["choices"][0]["message"]["content"].startswith("new")


@pytest.mark.parametrize("used_again", [False, True])
async def test_a_turn_that_runs_on_another_server_ends_with_404_and_leaves_nothing(
    tmp_path: Path, postgres_url: str, used_again: bool
) -> None:
    go_on = asyncio.Event()
    async with replicas(tmp_path, postgres_url, says("first", "again"), says("late")) as (one, two):
        await one.chat([user("hi")])
        plain = two.engine.generate

        async def generate(request: Any) -> Any:
            await go_on.wait()
            async for chunk in plain(request):
                yield chunk

        two.engine.generate = generate  # type: ignore[method-assign]
        turn = asyncio.ensure_future(two.post("/s/v1/chat/completions", {"messages": [user("more")]}))
        await until(lambda: two.app.state.turns.running.busy)
        await delete(one, "s")
        if used_again:
            await one.chat([user("hi")])
        go_on.set()
        response = await turn
        assert (response.status_code, response.json()["error"]["code"]) == (404, "session_not_found")
        if used_again:
            assert len(await one.tree()) == 1
        else:
            await until(lambda: rows_of(postgres_url) == [])  # the note that the turn began goes last
        assert (await two.http.get("/rl/sessions/s")).status_code == (200 if used_again else 404)


@pytest.mark.parametrize("format", ["json", "npz", "parquet"])
async def test_an_export_goes_on_when_one_of_its_sessions_is_deleted(
    tmp_path: Path, format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("a", "b")) as server:
        for name in ("a", "b"):
            await server.ok("/rl/start_session", {"session_id": name, "group_id": "g"})
            await server.chat([user("hi")], name)
            await server.ok(f"/{name}/rl/end_session", {"reward": 1.0})
        registry = server.app.state.registry
        count_begun = registry.count_begun

        async def after_a_deletion(name: str) -> Any:  # called for each session, before its turns are read
            await delete(server, "a")
            return await count_begun(name)

        monkeypatch.setattr(registry, "count_begun", after_a_deletion)
        body = {"filter": {"group_id": "g"}, "advantages": "grpo", "format": format}
        page = await server.post("/trajectories/export", body)
        samples = read_page(page.content, format).export.samples
        assert [sample.session_id for sample in samples] == ["b"]


async def test_a_request_of_a_deleted_session_leaves_the_mailbox(tmp_path: Path) -> None:
    async with posting(tmp_path) as server:
        asked = asyncio.ensure_future(server.post("/s/v1/chat/completions", {"messages": [user("hi")]}))
        letter = await server.letter()
        assert (await delete(server, "s")).status_code == 200
        assert (await asked).status_code == 404
        assert (await server.poll())["status"] == "empty"
        await server.refused(letter, 404, text="too late")
        assert (await server.post("/mailbox/next", {"session_id": "s"})).status_code == 404
