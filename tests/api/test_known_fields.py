"""A control endpoint refuses a field that it does not know, with the nearest one that it does, and does nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings
from tests.support import Server, says, serving, user

UNKNOWN = [
    ("/rl/start_session", {"task_id": "t", "metdata": {"a": 1}}, "metdata", "metadata"),
    ("/rl/start_session", {"task_id": "t", "limit": {"max_turns": 1}}, "limit", "limits"),
    ("/grant_capacity", {"number": 3}, "number", None),
    ("/s/rl/set_reward", {"reward": 1, "interaction": "ID"}, "interaction", "interaction_id"),
    ("/s/rl/end_session", {"rewrd": 1}, "rewrd", "reward"),
    ("/s/rl/mark", {"interaction_id": "ID", "trainable": True, "span": [[0, 1]]}, "span", "spans"),
    ("/s/rl/rotate_keys", {"key": ["agent"]}, "key", "keys"),
    ("/export_trajectories", {"session": "s"}, "session", "session_id"),
    ("/trajectories/claim", {"lease": 5}, "lease", "lease_s"),
    ("/trajectories/acknowledge", {"claim": "c"}, "claim", "claim_id"),
    ("/engine/pause_generation", {"mod": "abort"}, "mod", "mode"),
    ("/engine/continue_generation", {"mode": "abort"}, "mode", None),
    ("/engine/update_weights", {"path": "/w", "verson": 1}, "verson", "version"),
    ("/engine/release_memory", {"tag": ["weights"]}, "tag", "tags"),
    ("/engine/resume_memory", {"tag": ["weights"]}, "tag", "tags"),
    ("/engine/flush_cache", {"now": True}, "now", None),
    ("/engine/adapters", {"path": "/a", "verson": 1}, "verson", "version"),
    ("/engine/servers", {"urls": "http://a"}, "urls", "url"),
    ("/mailbox/next", {"wait": 1}, "wait", "wait_s"),
    ("/mailbox/deliver", {"request_id": "r", "texts": "x"}, "texts", "text"),
]


async def rewarded(server: Server) -> list[Any]:
    return [node["reward"] for node in await server.tree()]


async def test_every_control_endpoint_refuses_a_field_that_it_does_not_know(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        node = (await server.chat([user("hi")]))["id"]
        for path, body, param, near in UNKNOWN:
            sent = {name: node if value == "ID" else value for name, value in body.items()}
            response = await server.post(path, sent)
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, param), (path, response.text)
            assert near is None or f"did you mean '{near}'?" in error["message"], (path, error)
        shown = (await server.http.get("/rl/sessions/s")).json()
        assert (shown["status"], await rewarded(server)) == ("active", [None])
        sessions = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [session["session_id"] for session in sessions] == ["s"]


async def test_an_unknown_query_parameter_of_the_listing_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        response = await server.http.get("/rl/sessions?aftr=s")
        assert (response.status_code, response.json()["error"]["param"]) == (400, "aftr")


@pytest.mark.parametrize("capacity", [False, True])
async def test_a_refused_grant_grants_nothing(tmp_path: Path, capacity: bool) -> None:
    assert not Settings().capacity_control
    async with serving(tmp_path, says(), capacity_control=capacity) as server:
        assert (await server.post("/grant_capacity", {"number": 8})).status_code == 400
        assert await server.ok("/grant_capacity", {"n": 2}) == {"capacity": 2}


async def test_null_counts_as_absent_for_an_unknown_field_too(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        await server.chat([user("hi")])
        await server.ok("/s/rl/set_reward", {"reward": 1, "model": None})
        assert await rewarded(server) == [1.0]
