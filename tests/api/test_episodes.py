"""Endless traffic at one address or key is cut into sessions; no turn is lost, and each ends with a reason."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.scripted.scripts import Reply, Script, play
from tests.databases import execute
from tests.support import Server, assistant, sampled, serving, system, until, user

ADMIN = {"authorization": "Bearer " + "a" * 16}


def always(text: str = "ok") -> Script:
    reply = Reply(sampled(text), chunk=64)
    return lambda request: reply


@contextlib.asynccontextmanager
async def served(folder: Path, url: str, **more: Any) -> AsyncIterator[Server]:
    async with serving(folder, always(), database_url=url, **more) as server:
        yield server


async def start(server: Server, **episodes: Any) -> Any:
    return await server.ok("/rl/start_session", {"session_id": "alice", "episodes": episodes}, headers=ADMIN)


async def speak(server: Server, key: str | None, path: str = "", text: str = "hi", **headers: str) -> httpx.Response:
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    body = {"model": "m", "messages": [user(text)]}
    return await server.post(f"{path}/v1/chat/completions", body, headers=headers)


async def sessions(server: Server) -> dict[str, tuple[str, str | None, int]]:
    """By id: the status, the reason of the end, and the number of turns of each session, the oldest first."""
    listed = (await server.http.get("/rl/sessions", headers=ADMIN)).raise_for_status().json()["sessions"]
    found = {}
    for name in sorted(each["session_id"] for each in listed):
        shown = (await server.http.get(f"/rl/sessions/{name}", headers=ADMIN)).raise_for_status().json()
        found[name] = (shown["status"], shown["exit_reason"], len(shown["interactions"]))
    return found


async def ended(server: Server, count: int) -> dict[str, tuple[str, str | None, int]]:
    """The sessions, once `count` of them have ended."""
    while True:
        found = await sessions(server)
        if sum(status == "ended" for status, _, _ in found.values()) >= count:
            return found
        await asyncio.sleep(0.01)


async def test_a_key_opens_another_session_after_some_turns(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        started = await start(server, max_turns=2)
        for _ in range(5):
            assert (await speak(server, started["api_key"])).status_code == 200
        assert await ended(server, 2) == {
            "alice": ("ended", "cut: 2 turns", 2),
            "alice-1": ("ended", "cut: 2 turns", 2),
            "alice-2": ("active", None, 1),
        }


async def test_the_address_of_a_session_leads_to_its_newest_episode(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        started = await start(server, max_turns=1)
        secret = "/" + started["root_url"].split("/", 3)[3]
        for path, key in ((secret, None), (secret, "sk-none"), ("/alice", started["api_key"]), (secret, None)):
            assert (await speak(server, key, path)).status_code == 200
        assert (await speak(server, "sk-wrong", "/alice")).status_code == 401
        assert list(await ended(server, 3)) == ["alice", "alice-1", "alice-2", "alice-3"]


async def test_names_on_an_open_server_are_cut_by_its_settings(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, episode_turns=2) as server:
        for path in ("/bob", "/bob", "", "/bob", "", ""):
            assert (await speak(server, None, path)).status_code == 200
        found = await ended(server, 2)
        assert {name: turns for name, (_, _, turns) in found.items()} == {
            **{"bob": 2, "bob-1": 1},
            **{"default": 2, "default-1": 1},
        }


async def test_a_started_session_without_episodes_is_not_cut_by_settings(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, episode_turns=1) as server:
        await server.ok("/rl/start_session", {"session_id": "rollout"})
        for _ in range(3):
            await server.chat([user("hi")], "rollout")
        await server.ok("/rollout/rl/end_session", {})
        assert (await speak(server, None, "/rollout")).status_code == 403


async def test_a_pause_cuts_when_it_is_over_and_by_the_sweep(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        started = await start(server, idle_s=3600)
        episodes = server.app.state.registry
        await speak(server, started["api_key"])
        session = await episodes.get("alice")
        session.turned_at -= 3601
        await speak(server, started["api_key"])
        assert (await ended(server, 1))["alice"] == ("ended", "cut: idle for 3600 s", 1)
        (await episodes.get("alice-1")).turned_at -= 3601
        execute(database_url, "UPDATE sessions SET updated_at = 1")
        await server.app.state.episodes.sweep()
        assert (await ended(server, 2))["alice-1"] == ("ended", "cut: idle for 3600 s", 1)
        await speak(server, started["api_key"])
        assert (await sessions(server))["alice-2"] == ("active", None, 1)


async def test_a_header_names_the_episode(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server))["api_key"]
        for label in ("chat 1", "chat 1", "chat 2", None, "chat 2"):
            headers = {} if label is None else {"x-tokengrove-episode": label}
            assert (await speak(server, key, **headers)).status_code == 200
        found = await ended(server, 1)
        assert found == {
            "alice": ("ended", "cut: episode 'chat 2' began", 2),
            "alice-1": ("active", None, 3),
        }
        shown = (await server.http.get("/rl/sessions/alice-1", headers=ADMIN)).json()
        assert shown["metadata"] == {"episode": "chat 2"}


async def test_a_header_without_episodes_is_refused(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        refused = await speak(server, None, "/bob", **{"x-tokengrove-episode": "1"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-tokengrove-episode"


async def test_episodes_of_a_group_with_a_size_are_refused(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        body = {"session_id": "a", "group_id": "g", "group_size": 2, "episodes": {"max_turns": 1}}
        refused = await server.post("/rl/start_session", body)
        assert refused.status_code == 400 and "'group_size' does not go with 'episodes'" in refused.text
        for wrong in ({"max_turns": 0}, {"lineage": ["subagent"]}, {"turns": 1}):
            assert (await server.post("/rl/start_session", {"session_id": "a", "episodes": wrong})).status_code == 400


SUMMARY = "The user asked for a walk in the woods and got one that begins at the old mill by the river."


async def test_a_compaction_begins_an_episode_with_the_turn_that_goes_on(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server, lineage=["compaction"]))["api_key"]
        talk = [system("Be kind."), user("A walk, please.")]
        server.engine.script = always(SUMMARY)
        mine = {"authorization": f"Bearer {key}"}
        say = "/v1/chat/completions"
        first = await server.ok(say, {"model": "m", "messages": talk}, headers=mine)
        talk += [assistant(first["choices"][0]["message"]["content"]), user("Sum it up.")]
        await server.ok(say, {"model": "m", "messages": talk}, headers={**mine, "x-tokengrove-purpose": "summary"})
        compacted = [system("Be kind."), user(f"So far: {SUMMARY} Now another one.")]
        await server.ok(say, {"model": "m", "messages": compacted}, headers=mine)
        found = await ended(server, 1)
        assert found == {
            "alice": ("ended", "cut: a conversation began (compaction)", 2),
            "alice-1": ("active", None, 1),
        }


async def test_a_new_chat_begins_an_episode_and_a_title_does_not(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server, lineage=["new"]))["api_key"]
        await speak(server, key, text="First chat.")
        await speak(server, key, text="A title for it?", **{"x-tokengrove-purpose": "title"})
        await speak(server, key, text="Second chat.")
        assert await ended(server, 1) == {
            "alice": ("ended", "cut: a conversation began (new)", 2),
            "alice-1": ("active", None, 1),
        }


async def test_many_turns_at_once_around_cuts_are_all_recorded_and_answered(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server, max_turns=3))["api_key"]
        answers = await asyncio.gather(*(speak(server, key, text=f"turn {number}") for number in range(60)))
        assert [each.status_code for each in answers] == [200] * 60
        found = await sessions(server)
        assert [turns for _, _, turns in found.values()] == [3] * 20
        named = {each.json()["id"] for each in answers}
        assert len(named) == 60


@pytest.mark.parametrize(
    ("path", "asked"), [("chat/completions", {"messages": [user("hi")]}), ("generate", {"input_ids": [1]})]
)
async def test_turns_that_waited_for_the_engine_do_not_exceed_an_episode(
    tmp_path: Path, database_url: str, path: str, asked: dict[str, Any]
) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        mine = {"authorization": f"Bearer {(await start(server, max_turns=3))['api_key']}"}
        await server.ok("/engine/pause_generation", {"mode": "in_place"}, headers=ADMIN)
        body = {"model": "m", **asked}
        turns = [asyncio.ensure_future(server.post(f"/v1/{path}", body, headers=mine)) for _ in range(7)]
        session = await server.app.state.registry.get("alice")
        await until(lambda: session.waiting == 7)
        await server.ok("/engine/continue_generation", {}, headers=ADMIN)
        assert [each.status_code for each in await asyncio.gather(*turns)] == [200] * 7
        assert [turns for _, _, turns in (await sessions(server)).values()] == [3, 3, 1]


async def test_a_header_names_the_episode_of_a_turn_of_token_ids(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        mine = {"authorization": f"Bearer {(await start(server))['api_key']}"}
        for label in ("one", "two"):
            labelled = {**mine, "x-tokengrove-episode": label}
            assert (await server.post("/v1/generate", {"input_ids": [1]}, headers=labelled)).status_code == 200
        assert [turns for _, _, turns in (await sessions(server)).values()] == [1, 1]
        refused = await server.post("/v1/generate", {"input_ids": [1]}, headers={**ADMIN, "x-tokengrove-episode": "x"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "x-tokengrove-episode"


@pytest.mark.parametrize(
    ("path", "asked"),
    [("chat/completions", {"messages": [user("hi")], "n": 2}), ("completions", {"prompt": ["one", "two"]})],
)
async def test_a_reply_is_in_one_episode_with_all_of_its_turns(
    tmp_path: Path, database_url: str, path: str, asked: dict[str, Any]
) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        mine = {"authorization": f"Bearer {(await start(server, max_turns=3))['api_key']}"}
        for _ in range(2):
            answer = await server.ok(f"/v1/{path}", {"model": "m", **asked}, headers=mine)
            assert len(answer["choices"]) == 2
        more = {"n": 4} if "n" in asked else {"prompt": [*"abcd"]}
        assert len((await server.ok(f"/v1/{path}", {"model": "m", **asked, **more}, headers=mine))["choices"]) == 4
        assert [turns for _, _, turns in (await sessions(server)).values()] == [2, 2, 4]


async def test_a_session_ends_only_after_the_turns_that_run_in_it(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server, max_turns=1))["api_key"]
        quick, slow = Reply(sampled("ok"), chunk=64), Reply(sampled("ok"), chunk=64, delay_s=1.0)
        server.engine.script = play([slow, quick])
        first = asyncio.create_task(speak(server, key, text="slow"))
        await until(lambda: len(server.engine.running) == 1)
        assert (await speak(server, key, text="quick")).status_code == 200
        assert (await first).status_code == 200
        assert (await ended(server, 1))["alice"] == ("ended", "cut: 1 turns", 1)
        shown = (await server.http.get("/rl/sessions/alice", headers=ADMIN)).json()
        turn = (await server.http.get("/rl/sessions/alice?include=times", headers=ADMIN)).json()["interactions"][0]
        assert shown["ended_at"] >= turn["times"]["completed_at"]


async def test_an_episode_that_a_dead_server_had_cut_is_ended_by_the_next(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        key = (await start(server, max_turns=1))["api_key"]
        for _ in range(2):
            await speak(server, key)
        await ended(server, 1)
    execute(
        database_url,
        "UPDATE sessions SET status = 'active', ended_at = NULL, ended_order = NULL WHERE session_id = 'alice'",
    )
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        await server.app.state.episodes.sweep()
        assert (await ended(server, 1))["alice"][:2] == ("ended", "cut: followed by another episode")
        await speak(server, key)
        assert list(await ended(server, 2)) == ["alice", "alice-1", "alice-2"]


async def test_two_servers_of_one_database_cut_one_address(tmp_path: Path, postgres_url: str) -> None:
    async with (
        served(tmp_path, postgres_url, admin_key="a" * 16) as one,
        served(tmp_path, postgres_url, admin_key="a" * 16) as two,
    ):
        key = (await start(one, max_turns=4))["api_key"]
        answers = await asyncio.gather(*(speak(each, key, text=f"{n}") for n, each in enumerate([one, two] * 30)))
        assert [each.status_code for each in answers] == [200] * 60
        found = await sessions(one)
        assert sum(turns for _, _, turns in found.values()) == 60 and len(found) > 1


@pytest.mark.parametrize("kind", ["control_key", "feedback_key"])
async def test_a_turn_of_an_episode_that_was_cut_is_rewarded_by_the_id_of_its_reply(
    tmp_path: Path, database_url: str, kind: str
) -> None:
    async with served(tmp_path, database_url, admin_key="a" * 16) as server:
        started = await start(server, max_turns=1)
        key = started["control_key"]
        if kind == "feedback_key":
            control = {"authorization": f"Bearer {key}"}
            key = (await server.ok("/rl/rotate_keys", {"keys": ["feedback"]}, headers=control))["feedback_key"]
        replies = [(await speak(server, started["api_key"])).json()["id"] for _ in range(3)]
        await ended(server, 2)
        for value, name in enumerate(replies):
            body = {"interaction_id": name, "reward": value}
            told = await server.ok("/rl/set_reward", body, headers={"authorization": f"Bearer {key}"})
            assert told == {"interaction_ids": [name]}
        for number, name in enumerate(["alice", "alice-1", "alice-2"]):
            shown = (await server.http.get(f"/rl/sessions/{name}", headers=ADMIN)).json()
            assert [each["reward"] for each in shown["interactions"]] == [number]
