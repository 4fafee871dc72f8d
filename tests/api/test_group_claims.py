"""Claims by whole groups: a group is leased together, once all its sessions have ended, and its advantages stay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.api.test_claims import acknowledge, claim, finish, served, two_servers
from tests.databases import meanwhile
from tests.exports import entries
from tests.support import Server, user
from tests.wide import CROSSED

COMPARED = {"layout": "concat", "advantages": "leave_one_out"}


async def start(server: Server, *names: str, **fields: Any) -> None:
    """Start sessions and let each take a turn."""
    for name in names:
        await server.ok("/rl/start_session", {"session_id": name, **fields})
        await server.chat([user("hi")], name)


async def end(server: Server, **rewards: float) -> None:
    for name, reward in rewards.items():
        await server.ok(f"/{name}/rl/end_session", {"reward": reward})


async def held(server: Server, **body: Any) -> list[str]:
    sessions: list[str] = list(entries(await claim(server, **body)))
    return sessions


async def test_a_group_is_leased_whole_when_its_last_session_has_ended(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", "c", group_id="g", group_size=3)
        await end(server, b=1.0, a=0.0)
        assert await held(server, limit=8) == []
        waiting = asyncio.create_task(claim(server, wait_s=60))  # its limit of 1 is smaller than the group
        await end(server, c=2.0)
        assert list(entries(await waiting)) == ["b", "a", "c"]
        assert await held(server, limit=8) == []


async def test_a_group_waits_for_sessions_that_have_not_started(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b", group_id="g", group_size=3)
        assert await held(server, limit=8) == []
        assert await held(server, limit=8, group_size=2) == ["a", "b"]


async def test_a_claim_asks_for_whole_groups_of_sessions_that_were_started_without_a_size(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "alone")
        await start(server, "r1", "r2", group_id="runs")
        await finish(server, "g1", "g2", group_id="g")
        await end(server, r1=1.0)
        assert await held(server, limit=8, group_size=3) == []
        assert await held(server, limit=8, group_size=2) == ["g1", "g2"]
        assert await held(server, limit=8, group_size=1) == ["alone"]
        assert await held(server, limit=8) == ["r1"]


async def test_a_claim_takes_as_many_whole_groups_as_its_limit_holds(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        for group in ("g", "h", "i"):
            await finish(server, f"{group}1", f"{group}2", group_id=group, group_size=2)
        await finish(server, "alone")
        assert await held(server, limit=5) == ["g1", "g2", "h1", "h2"]
        assert await held(server, limit=3) == ["i1", "i2", "alone"]


async def test_a_group_of_which_a_claim_holds_a_session_is_leased_afterwards(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b", "c", group_id="g")
        first = await claim(server)
        assert await held(server, limit=8, group_size=3) == []
        await acknowledge(server, claim_id=first["claim_id"])
        assert await held(server, limit=8, group_size=3) == ["b", "c"]


async def test_what_a_claim_said_once_it_says_again(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", "c", group_id="g")
        await end(server, a=1.0, b=3.0)
        body = {"claim_id": "mine", "limit": 2, "export": COMPARED}
        first = await claim(server, **body)
        assert [sample["advantages"] for sample in first["samples"]] == [[-2.0], [2.0]]
        await end(server, c=8.0)
        again = await claim(server, **body)
        assert {**again, "lease_until": None} == {**first, "lease_until": None}
        assert entries(again)["a"]["group_members"] == 2
        later = await claim(server, limit=2, export=COMPARED)  # another claim sees all three
        assert [sample["advantages"] for sample in later["samples"]] == [[6.0]]


async def test_the_advantages_of_a_whole_group_do_not_depend_on_when_it_is_claimed(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", "none", "late", group_id="g", group_size=4)
        await end(server, a=1.0, b=3.0)
        await server.ok("/none/rl/end_session", {})
        await server.ok("/late/rl/end_session", {"reward": 9.0, "outcome": "Failed"})
        found = await claim(server, export=COMPARED)
        assert {name: entry["left_out"] for name, entry in entries(found).items()} == {
            "a": None,
            "b": None,
            "none": "unrewarded",
            "late": "failed",
        }
        assert [sample["advantages"] for sample in found["samples"]] == [[-2.0], [2.0]]


async def test_the_size_of_a_group_needs_its_name(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        for path, body, field in (
            ("/rl/start_session", {"task_id": "t", "group_size": 2}, "group_id"),
            ("/rl/start_session", {"task_id": "t", "group_id": "g", "group_size": 0}, "group_size"),
            ("/trajectories/claim", {"group_size": "two"}, "group_size"),
        ):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        await server.ok("/rl/start_session", {"session_id": "s", "group_id": "g", "group_size": 2})
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        assert [session["group_size"] for session in listed] == [2]


async def test_two_servers_never_divide_a_group(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url) as servers:
        for number in range(6):
            await finish(servers[0], *(f"g{number}-{n}" for n in range(3)), group_id=f"g{number}", group_size=3)
        claims = await asyncio.gather(*(claim(servers[n % 2], limit=3, wait_s=30) for n in range(6)))
        groups = [{name.partition("-")[0] for name in entries(found)} for found in claims]
        assert [len(entries(found)) for found in claims] == [3] * 6
        assert sorted(name for (name,) in groups) == [f"g{number}" for number in range(6)]


async def test_a_group_with_a_locked_session_is_left_to_the_next_claim(tmp_path: Path, postgres_url: str) -> None:
    async with served(tmp_path, postgres_url) as server:
        await finish(server, "a", "b", group_id="g", group_size=2)
        await finish(server, "c")
        with meanwhile(postgres_url, "SELECT 1 FROM sessions WHERE session_id = 'b' FOR UPDATE"):
            async with asyncio.timeout(60):
                assert await held(server, limit=8) == ["c"]
        assert await held(server, limit=8) == ["a", "b"]


@CROSSED
@pytest.mark.parametrize("body", [{"group_size": 2}, {}])
async def test_a_filter_keeps_groups_whole_among_what_it_selects(
    tmp_path: Path, database_url: str, body: dict[str, Any]
) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", "b", group_id="g", group_size=2)
        await server.ok("/a/rl/end_session", {"outcome": "Finished", "reward": 1})
        assert await held(server, limit=8, filter={"outcome": "Finished"}, **body) == []
        await server.ok("/b/rl/end_session", {"outcome": "Failed"})
        assert await held(server, limit=8, filter={"outcome": "Finished"}, **body) == ["a"]


@CROSSED
@pytest.mark.parametrize("body", [{"group_size": 2}, {}])
async def test_a_validation_session_is_no_member_of_a_group_unless_it_is_asked_for(
    tmp_path: Path, database_url: str, body: dict[str, Any]
) -> None:
    async with served(tmp_path, database_url) as server:
        await start(server, "a", group_id="g", group_size=2)
        await start(server, "v", "w", group_id="g", group_size=2, metadata={"validate": True})
        await end(server, a=1.0, v=2.0)
        assert await held(server, limit=8, **body) == []  # one session is no group of two
        await start(server, "b", group_id="g", group_size=2)
        await end(server, b=0.0)
        assert await held(server, limit=8, **body) == ["a", "b"]  # while w runs
        await end(server, w=0.0)
        assert await held(server, limit=8, filter={"validation": "only"}, **body) == ["v", "w"]
