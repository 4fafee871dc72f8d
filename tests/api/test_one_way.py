"""One way to say a thing: paging, naming a turn, a weight version, a list of sessions, and the names of endpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.exports import read
from tests.support import Server, says, serving, user
from tokengrove.client import read as read_export


async def turns(server: Server, *texts: str, session: str = "s") -> list[str]:
    """Take one turn a text, each a root; return their interaction ids."""
    return [(await server.chat([user(text)], session))["id"] for text in texts]


async def listed(server: Server, query: str = "") -> Any:
    response = await server.http.get(f"/rl/sessions{query}")
    assert response.status_code == 200, response.text
    return response.json()


async def test_every_listing_is_paged_by_cursor(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abc")) as server:
        for name in ("one", "two", "three"):
            await turns(server, "hi", session=name)
        seen, cursor = [], ""
        while cursor is not None:
            page = await listed(server, f"?limit=2&cursor={cursor}" if cursor else "?limit=2")
            seen += [entry["session_id"] for entry in page["sessions"]]
            cursor = page["cursor"]
        assert seen == ["one", "two", "three"]
        assert (await listed(server))["cursor"] is None


async def test_the_older_name_of_the_listings_cursor_pages_alike(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        for name in ("one", "two"):
            await turns(server, "hi", session=name)
        assert await listed(server, "?after=one") == await listed(server, "?cursor=one")


@pytest.mark.parametrize(
    ("query", "param", "words"),
    [
        ("?cursr=s", "cursr", "did you mean 'cursor'? this endpoint accepts limit, cursor"),
        ("?group_id=g", "group_id", "this endpoint accepts limit, cursor"),
        ("?cursor=s&after=s", "after", "this endpoint accepts limit, cursor"),
        ("?cursor=nobody", "cursor", "give the cursor of the last page"),
        ("?limit=0", "limit", "limit"),
        ("?limit=1001", "limit", "limit"),
        ("?limit=many", "limit", "limit"),
    ],
)
async def test_a_wrong_query_of_the_listing_is_refused_by_name(
    tmp_path: Path, query: str, param: str, words: str
) -> None:
    async with serving(tmp_path, says("a")) as server:
        await turns(server, "hi")
        response = await server.http.get(f"/rl/sessions{query}")
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert words in error["message"]


MARKING: list[tuple[str, dict[str, Any]]] = [
    ("mark", {"trainable": False}),
    ("set_reward", {"reward": 1.0}),
    ("set_reward", {"token_rewards": [0.5, 0.5]}),
    ("end_session", {"reward": 1.0}),
]


@pytest.mark.parametrize(("verb", "body"), MARKING)
async def test_a_turn_is_named_by_its_number_its_id_or_both(tmp_path: Path, verb: str, body: dict[str, Any]) -> None:
    async with serving(tmp_path, says(*"abcdef")) as server:
        changed = []
        for session, named in (
            ("by-turn", ("turn",)),
            ("by-id", ("interaction_id",)),
            ("both", ("turn", "interaction_id")),
        ):
            first, _ = await turns(server, "one", "two", session=session)
            target = {"turn": 0, "interaction_id": first}
            await server.ok(f"/{session}/rl/{verb}", {**body, **{name: target[name] for name in named}})
            nodes = await server.tree(session)
            changed.append([(node["trainable"], node["reward"]) for node in nodes])
        assert changed[0] == changed[1] == changed[2]
        assert changed[0][1] == (True, None)


@pytest.mark.parametrize(("verb", "body"), MARKING)
async def test_a_number_and_an_id_of_different_turns_are_refused(
    tmp_path: Path, verb: str, body: dict[str, Any]
) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        first, second = await turns(server, "one", "two")
        response = await server.post(f"/s/rl/{verb}", {**body, "turn": 1, "interaction_id": first})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "turn")
        assert first in error["message"] and second in error["message"]
        assert [(node["trainable"], node["reward"]) for node in await server.tree()] == [(True, None)] * 2


async def test_a_turn_has_its_number_and_its_id_wherever_it_is_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        first, second = await turns(server, "one", "two")
        tree = [(node["turn"], node["interaction_id"], node["id"]) for node in await server.tree()]
        assert tree == [(0, first, first), (1, second, second)]
        for name in (first, "0"):
            shown = (await server.http.get(f"/rl/sessions/s/interactions/{name}")).json()
            assert (shown["turn"], shown["interaction_id"], shown["id"]) == (0, first, first)
        exported = await server.export(layout="individual")
        assert [sample["turns"][0]["interaction_id"] for sample in exported] == [first, second]


async def test_a_mark_without_a_turn_names_both_ways(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        await turns(server, "hi")
        response = await server.post("/s/rl/mark", {"trainable": True})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, "interaction_id")
        assert "'interaction_id' or 'turn'" in error["message"]


async def test_areals_names_of_endpoints_answer_alike(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        await turns(server, "hi")
        body = {"session_id": "s", "layout": "concat"}
        assert await server.ok("/trajectories/export", body) == await server.ok("/export_trajectories", body)
        assert await server.ok("/rl/grant_capacity", {"n": 2}) == {"capacity": 2}
        assert await server.ok("/grant_capacity", {"n": 1}) == {"capacity": 3}
        for path in ("/trajectories/export", "/export_trajectories", "/rl/grant_capacity", "/grant_capacity"):
            assert (await server.post(path, {"nothing": 1})).json()["error"]["param"] == "nothing"


def names(value: Any) -> set[str]:
    """The names of all fields in a JSON value, at any depth."""
    if isinstance(value, list):
        return set().union(*map(names, value))
    if not isinstance(value, dict):
        return set()
    return set(value).union(*map(names, value.values()))


async def test_a_weight_version_is_version_everywhere(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        updated = await server.ok("/engine/update_weights", {"path": "w", "version": 7})
        await turns(server, "hi")
        node = (await server.tree())[0]
        ready = (await server.http.get("/ready")).json()
        shown = (await server.http.get("/rl/sessions/s")).json()
        [entry] = (await listed(server))["sessions"]
        assert [each["version"] for each in (updated, ready, shown, entry)] == [7] * 4
        assert {version for _, version in node["versions"]} == {7}
        generated = await server.ok("/s/v1/generate", {"input_ids": [72], "sampling_params": {"max_new_tokens": 2}})
        await server.ok("/s/rl/end_session", {})
        exported = await server.ok("/trajectories/export", {"session_id": "s"})
        claimed = await server.ok("/trajectories/claim", {})
        assert set(generated["versions"]) == {7} and claimed["sessions"][0]["version"] == 7
        for answer in (updated, ready, shown, entry, exported, claimed, generated):
            assert not {name for name in names(answer) if name.endswith(("_version", "_versions"))}


@pytest.mark.parametrize("format", ["json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet"])
async def test_sessions_of_every_answer_are_a_list_of_objects(tmp_path: Path, format: str) -> None:
    async with serving(tmp_path, says(*"ab")) as server:
        for session in ("one", "two"):
            await server.ok("/rl/start_session", {"session_id": session, "group_id": "g", "task_id": "t"})
            await turns(server, "hi", session=session)
            await server.ok(f"/{session}/rl/end_session", {})
        body = {"format": format}
        exported = (await server.post("/trajectories/export", body)).content
        claimed = (await server.post("/trajectories/claim", {"limit": 2, "export": body})).content
        told = [sessions_of(format, content) for content in (exported, claimed)]
        told += [(await server.ok("/trajectories/claim", {"limit": 2, "lease_s": 0, "claim_id": "none"}))["sessions"]]
        told += [(await listed(server))["sessions"]]
        for sessions in (*told[:2], told[3]):
            assert [(entry["session_id"], entry["group_id"], entry["task_id"]) for entry in sessions] == [
                ("one", "g", "t"),
                ("two", "g", "t"),
            ]
        assert told[2] == []


def sessions_of(format: str, content: bytes) -> Any:
    return json.loads(content)["sessions"] if format == "areal" else read(format, content)["sessions"]


async def test_a_claim_without_samples_has_the_objects_of_the_listing(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        await turns(server, "hi")
        await server.ok("/s/rl/end_session", {"outcome": "Finished", "metrics": {"steps": 1}})
        claimed = await server.ok("/trajectories/claim", {})
        assert claimed["sessions"] == (await listed(server))["sessions"]
        assert claimed["sessions"][0]["metrics"] == {"steps": 1}


def test_exports_that_version_0_1_0_wrote_are_read(tmp_path: Path) -> None:
    old = b'{"samples":[],"sessions":{"s":{"status":"ended"}},"cursor":null}'
    assert read_export(old, "json").sessions == {"s": {"session_id": "s", "status": "ended"}}
