"""Trainers share one queue of ended sessions: in order, at least once, each acknowledged exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from sqlalchemy import create_engine, event
from sqlalchemy.pool import NullPool

from proxy.api import claim_endpoints
from proxy.engine.scripted.scripts import Reply, Script
from proxy.store.database import parse_url
from proxy.store.leases import Lease, LeaseRequest
from proxy.store.session_query import SessionQuery
from proxy.store.sql import claims
from tests.databases import execute, meanwhile
from tests.exports import entries
from tests.support import Server, sampled, serving, until, user
from tests.wide import CROSSED


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


@contextlib.asynccontextmanager
async def served(folder: Path, url: str, **settings: Any) -> AsyncIterator[Server]:
    async with serving(folder, always(), database_url=url, **settings) as server:
        yield server


@contextlib.asynccontextmanager
async def two_servers(folder: Path, url: str) -> AsyncIterator[tuple[Server, Server]]:
    async with served(folder, url) as one, served(folder, url) as two:
        yield one, two


async def finish(server: Server, *names: str, **start: Any) -> None:
    """Start sessions of one turn each and end them in this order."""
    for name in names:
        await server.ok("/rl/start_session", {"session_id": name, **start})
        await server.chat([user("hi")], name)
    for name in names:
        await server.ok(f"/{name}/rl/end_session", {"reward": 1.0})


async def claim(server: Server, **body: Any) -> Any:
    return await server.ok("/trajectories/claim", body)


async def acknowledge(server: Server, **body: Any) -> Any:
    return await server.ok("/trajectories/acknowledge", body)


def expire_leases(url: str) -> None:
    """Expire every lease, as if time had passed."""
    execute(url, "UPDATE sessions SET claimed_until = 1 WHERE claimed_until IS NOT NULL")


async def test_ended_sessions_are_claimed_in_the_order_in_which_they_ended(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        for name in "abcd":
            await server.chat([user("hi")], name)
        for name in "cab":
            await server.ok(f"/{name}/rl/end_session", {})
        first = await claim(server, limit=2)
        assert list(entries(first)) == ["c", "a"]
        assert first["claim_id"]
        assert list(entries(await claim(server, limit=2))) == ["b"]
        assert await claim(server, limit=2) == {"sessions": [], "claim_id": None, "lease_until": None}
        await server.ok("/d/rl/end_session", {})
        assert list(entries(await claim(server, limit=2))) == ["d"]


async def test_a_filter_selects_sessions_and_leaves_the_others(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", group_id="g1", task_id="t")
        await finish(server, "b", group_id="g2", task_id="t")
        assert list(entries(await claim(server, limit=9, filter={"group_id": "g2"}))) == ["b"]
        assert list(entries(await claim(server, limit=9, filter={"task_id": "t"}))) == ["a"]


@CROSSED
@pytest.mark.parametrize("filters", [{"purpose": "main"}, {"agent": "a"}, {"min_version": 0}, {"max_version_span": 0}])
async def test_a_filter_of_samples_needs_an_export(tmp_path: Path, database_url: str, filters: dict[str, Any]) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a")
        refused = await server.post("/trajectories/claim", {"filter": filters})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"filter.{next(iter(filters))}")
        assert entries(await claim(server, filter=filters, export={"format": "json"})).keys() == {"a"}


async def test_acknowledged_sessions_never_come_back_and_repeats_are_harmless(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b")
        held = await claim(server, limit=2)
        for _ in range(2):
            done = await acknowledge(server, claim_id=held["claim_id"])
            assert done == {"acknowledged": ["a", "b"], "lost": {}}
    expire_leases(database_url)
    async with served(tmp_path, database_url) as server:
        assert list(entries(await claim(server, limit=2))) == []


async def test_an_acknowledged_session_is_acknowledged_again_without_its_claim_and_keeps_its_time(
    tmp_path: Path,
) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with served(tmp_path, url) as server:
        await finish(server, "a")
        held = await claim(server, lease_s=600)
        await acknowledge(server, claim_id=held["claim_id"])
        execute(url, "UPDATE sessions SET acknowledged_at = 7.0")
        assert await acknowledge(server, session_ids=["a"]) == {"acknowledged": ["a"], "lost": {}}
        assert execute(url, "SELECT acknowledged_at FROM sessions") == [(7.0,)]


async def test_an_expired_lease_puts_its_sessions_back_in_their_old_places(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b", "c")
        dead = await claim(server, limit=2, consumer="dead")
        assert dead["claim_id"].startswith("dead-")
        expire_leases(database_url)
        alive = await claim(server, limit=2, consumer="alive")
        assert list(entries(alive)) == ["a", "b"]
        late = await acknowledge(server, claim_id=dead["claim_id"], session_ids=list(entries(dead)))
        assert late == {"acknowledged": [], "lost": dict.fromkeys("ab", alive["claim_id"])}
        refused = await server.post("/trajectories/acknowledge", {"claim_id": dead["claim_id"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (404, "claim_id")
        assert (await acknowledge(server, claim_id=alive["claim_id"]))["acknowledged"] == ["a", "b"]


async def test_an_expired_lease_that_nobody_took_over_can_still_be_acknowledged(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a")
        held = await claim(server, lease_s=0.0)
        assert (await acknowledge(server, claim_id=held["claim_id"]))["acknowledged"] == ["a"]
        assert list(entries(await claim(server))) == []


async def test_a_repeated_claim_returns_its_sessions_and_renews_the_lease(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b", "c")
        first = await claim(server, limit=2, claim_id="mine", lease_s=60)
        again = await claim(server, limit=3, claim_id="mine", lease_s=600)
        assert (list(entries(first)), list(entries(again))) == (["a", "b"], ["a", "b"])
        assert again["lease_until"] > first["lease_until"] + 500
        await acknowledge(server, claim_id="mine", session_ids=["a"])
        assert list(entries(await claim(server, limit=3, claim_id="mine"))) == ["b"]
        # A lease of 0 s releases the session.
        await claim(server, claim_id="mine", lease_s=0)
        assert list(entries(await claim(server, limit=3))) == ["b", "c"]


async def test_a_renewed_claim_that_lost_everything_gets_nothing_new(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b")
        await claim(server, claim_id="mine", lease_s=0)
        assert list(entries(await claim(server, claim_id="other"))) == ["a"]
        assert list(entries(await claim(server, claim_id="mine", renew=True, wait_s=600))) == []
        assert list(entries(await claim(server, claim_id="other", renew=True))) == ["a"]
        assert list(entries(await claim(server))) == ["b"]


async def test_a_repeated_claim_answers_at_once_whatever_its_wait_s(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b")
        await claim(server, claim_id="mine")
        await acknowledge(server, claim_id="mine")
        assert list(entries(await claim(server, claim_id="mine", wait_s=600))) == []


async def test_the_next_end_wakes_a_waiting_claim(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_endpoints, "_WATCH_S", 3600.0)  # no polling in the meantime
    async with served(tmp_path, database_url) as server, asyncio.timeout(60):
        await server.chat([user("hi")], "a")
        ring = server.app.state.store.claims.ends.listen()
        waiting = asyncio.create_task(claim(server, wait_s=600))
        await until(lambda: bool(ring._waiters))
        await server.ok("/a/rl/end_session", {})
        assert list(entries(await waiting)) == ["a"]


async def test_a_claim_waits_for_an_end_on_another_server_and_for_leases(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url) as (one, two):
        await one.chat([user("hi")], "a")
        waiting = asyncio.create_task(claim(two, wait_s=60))
        await one.ok("/a/rl/end_session", {})
        held = await waiting
        assert list(entries(held)) == ["a"]
        waiting = asyncio.create_task(claim(two, wait_s=60))
        expire_leases(postgres_url)
        assert list(entries(await waiting)) == ["a"]


async def test_a_claim_can_answer_with_the_samples_themselves(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "b", "a")
        body = {"limit": 5, "export": {"layout": "concat"}}
        response = await server.post("/trajectories/claim", body)
        answer = response.json()
        assert response.headers["x-tokengrove-claim"] == answer["claim_id"]
        assert [sample["session_id"] for sample in answer["samples"]] == ["b", "a"]
        assert list(entries(answer)) == ["b", "a"]
        exported = await server.ok("/export_trajectories", {"session_ids": ["a", "b"], "layout": "concat"})
        assert sorted(answer["samples"], key=str) == sorted(exported["samples"], key=str)
        assert (await acknowledge(server, claim_id=answer["claim_id"]))["acknowledged"] == ["b", "a"]
        empty = await server.post("/trajectories/claim", body)
        assert "x-tokengrove-claim" not in empty.headers
        assert empty.json() == {"samples": [], "sessions": [], "cursor": None, "claim_id": None, "lease_until": None}


async def test_groups_of_claimed_samples_contain_only_ended_sessions(tmp_path: Path, database_url: str) -> None:
    """A running session has no final score: counted as 0, it would raise all other advantages."""
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b", group_id="g")
        await server.ok("/b/rl/set_reward", {"reward": 3.0})
        await server.ok("/rl/start_session", {"session_id": "runs", "group_id": "g"})
        await server.chat([user("hi")], "runs")
        compared = {"layout": "concat", "advantages": "leave_one_out"}
        claimed = (await claim(server, limit=1, export=compared))["samples"]
        assert [sample["advantages"] for sample in claimed] == [[-2.0]]
        exported = await server.ok("/export_trajectories", {"filter": {"group_id": "g"}, **compared})
        left_out = {name: entry["left_out"] for name, entry in entries(exported).items()}
        assert left_out == {"a": None, "b": None, "runs": "active"}
        assert [sample["advantages"] for sample in exported["samples"]] == [[-2.0], [2.0]]
        asked = {"filter": {"group_id": "g"}, **compared, "unrewarded": "zero"}
        exported = await server.ok("/export_trajectories", asked)
        assert [sample["advantages"] for sample in exported["samples"]] == [[-0.5], [2.5], [-2.0]]


async def test_sessions_that_cannot_be_exported_are_released_at_once(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a")
        padded = {"layout": "padded", "prompt_length": 1, "response_length": 1, "on_too_long": "refuse"}
        refused = await server.post("/trajectories/claim", {"export": padded})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_too_long")
        assert list(entries(await claim(server))) == ["a"]


async def test_a_claim_answers_in_any_format_with_its_id_in_a_header(tmp_path: Path, database_url: str) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a")
        body = {"export": {"layout": "concat", "format": "jsonl"}, "consumer": "me"}
        response = await server.post("/trajectories/claim", body)
        sample, end = map(orjson.loads, response.text.splitlines())
        assert (sample["session_id"], end["claim_id"]) == ("a", response.headers["x-tokengrove-claim"])
        assert (await acknowledge(server, claim_id=end["claim_id"]))["acknowledged"] == ["a"]


async def test_sessions_are_acknowledged_without_a_claim_unless_one_holds_them(
    tmp_path: Path, database_url: str
) -> None:
    async with served(tmp_path, database_url) as server:
        await finish(server, "a", "b")
        held = await claim(server)
        done = await acknowledge(server, session_ids=["a", "b", "b"])
        assert done == {"acknowledged": ["b"], "lost": {"a": held["claim_id"]}}
        assert (await acknowledge(server, session_ids=["b"]))["acknowledged"] == ["b"]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("claim", {"limit": 0}, 400, "limit"),
        ("claim", {"lease_s": -1}, 400, "lease_s"),
        ("claim", {"wait_s": 601}, 400, "wait_s"),
        ("claim", {"consumer": "a b"}, 400, "consumer"),
        ("claim", {"claim_id": "é"}, 400, "claim_id"),
        ("claim", {"filter": {"colour": "red"}}, 400, "filter.colour"),
        ("claim", {"layout": "concat"}, 400, "layout"),
        ("claim", {"train": {"turns": "last"}}, 400, "train"),
        ("claim", {"leases": 5}, 400, "leases"),
        ("claim", {"export": {"discont": 0.9}}, 400, "export.discont"),
        ("claim", {"filter": {"status": "active"}, "wait_s": 600}, 400, "filter.status"),
        ("claim", {"group_id": "g"}, 400, "group_id"),
        ("claim", {"session_ids": ["live"]}, 400, "session_ids"),
        ("claim", {"cursor": "live"}, 400, "cursor"),
        ("claim", {"filter": {"purpose": "agent"}}, 400, "filter.purpose"),
        ("claim", {"export": {"layout": "round"}}, 400, "layout"),
        ("claim", {"export": {"limit": 3}}, 400, "limit"),
        ("claim", {"export": []}, 400, "export"),
        ("claim", {"renew": True}, 400, "claim_id"),
        ("claim", {"renew": "yes", "claim_id": "x"}, 400, "renew"),
        ("acknowledge", {}, 400, "claim_id"),
        ("acknowledge", {"claim_id": "nobody's"}, 404, "claim_id"),
        ("acknowledge", {"session_ids": ["nobody"]}, 404, "session_ids"),
        ("acknowledge", {"session_ids": ["live"]}, 400, "session_ids"),
        ("acknowledge", {"session_ids": [1]}, 400, "session_ids[0]"),
    ],
)
async def test_a_wrong_field_is_named(tmp_path: Path, path: str, body: Any, status: int, param: str) -> None:
    async with serving(tmp_path, always()) as server:
        await server.chat([user("hi")], "live")
        response = await server.post(f"/trajectories/{path}", body)
        assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_a_claim_never_scans_acknowledged_sessions(tmp_path: Path, database_url: str) -> None:
    """Both databases use the index of waiting sessions, so the cost does not grow with the acknowledged ones."""
    async with served(tmp_path, database_url) as server:
        database = server.app.state.store.database
        statements: list[tuple[str, Any]] = []
        event.listen(
            database._writer_engine, "before_cursor_execute", lambda *seen: statements.append((seen[2], seen[3]))
        )
        await claim(server, limit=5)
        [(query, values)] = [each for each in statements if "ended_order IS NOT NULL" in each[0]]
        with database._reader_engine.connect() as connection:
            if connection.dialect.name == "sqlite":
                explained = connection.exec_driver_sql("EXPLAIN QUERY PLAN " + query, values).all()
            else:
                connection.exec_driver_sql("SET enable_seqscan = off")  # it is cheaper on an empty table
                explained = connection.exec_driver_sql("EXPLAIN " + query, values).all()
        plan = " ".join(str(cell) for row in explained for cell in row)
        assert "ix_sessions_waiting" in plan
        assert "sort" not in plan.lower() and "TEMP B-TREE" not in plan


async def test_consuming_needs_the_admin_key(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        for path in ("claim", "acknowledge"):
            assert (await server.post(f"/trajectories/{path}", {"claim_id": "x"})).status_code == 401
            as_admin = {"authorization": "Bearer admin"}
            assert (await server.post(f"/trajectories/{path}", {"claim_id": "x"}, headers=as_admin)).status_code != 401


async def test_trainers_that_die_and_trainers_that_work_acknowledge_each_session_exactly_once(
    tmp_path: Path, database_url: str
) -> None:
    """Every third trainer dies and its short lease expires; others take over while agents end sessions."""
    async with served(tmp_path, database_url) as server:
        await share([server], database_url)


async def test_trainers_on_two_servers_acknowledge_each_session_exactly_once(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url) as servers:
        await share([*servers], postgres_url)


async def share(servers: list[Server], url: str) -> None:
    names = [f"s{n}" for n in range(24)]
    acknowledged: Counter[str] = Counter()
    first_given: list[str] = []

    async def trainer(server: Server, number: int) -> None:
        for made in itertools.count(number):
            if sum(acknowledged.values()) >= len(names):
                return
            dies = made % 3 == 0
            lease_s = 0.05 if dies else 60
            held = await claim(server, limit=3, wait_s=0.2, lease_s=lease_s, consumer=f"trainer-{number}")
            first_given.extend(name for name in entries(held) if name not in first_given)
            if entries(held) and not dies:
                done = await acknowledge(server, claim_id=held["claim_id"])
                assert done["lost"] == {}
                acknowledged.update(done["acknowledged"])

    async def environment(number: int) -> None:
        for name in names[number::4]:
            await finish(servers[number % len(servers)], name)

    trainers = [trainer(servers[n % len(servers)], n) for n in range(4)]
    async with asyncio.timeout(120):
        await asyncio.gather(*trainers, *(environment(n) for n in range(4)))
    assert acknowledged == dict.fromkeys(names, 1)
    assert sorted(first_given) == sorted(names)
    rows = execute(url, "SELECT count(*), count(acknowledged_at), count(DISTINCT ended_order) FROM sessions")
    assert rows == [(24, 24, 24)]


async def test_concurrent_claims_on_two_servers_get_different_sessions(tmp_path: Path, postgres_url: str) -> None:
    async with two_servers(tmp_path, postgres_url) as servers:
        await finish(servers[0], *(f"s{n}" for n in range(12)))
        claims = await asyncio.gather(*(claim(servers[n % 2], limit=2, wait_s=5) for n in range(6)))
        given = Counter(name for held in claims for name in entries(held))
        assert given == {f"s{n}": 1 for n in range(12)}


async def test_one_claim_on_two_servers_at_once_gets_the_same_sessions(tmp_path: Path, postgres_url: str) -> None:
    async with served(tmp_path, postgres_url) as server:
        await finish(server, "s0", "s1")
    wanted = LeaseRequest("mine", SessionQuery(), limit=1, lease_s=60.0)
    engine = create_engine(parse_url(postgres_url), poolclass=NullPool)

    def again() -> Lease:
        with engine.begin() as connection:
            return claims.claim(connection, [wanted])[0]

    with engine.begin() as connection:
        (first,) = claims.claim(connection, [wanted])
        second = asyncio.create_task(asyncio.to_thread(again))
        waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
        while not second.done() and not execute(postgres_url, waiting):  # noqa: ASYNC110 (a database lock sets no event)
            await asyncio.sleep(0.01)
    assert (first.sessions, (await second).sessions) == (("s0",), ("s0",))


async def test_a_claim_skips_sessions_that_another_transaction_is_claiming(tmp_path: Path, postgres_url: str) -> None:
    async with served(tmp_path, postgres_url) as server:
        await finish(server, "a", "b")
        with meanwhile(postgres_url, "SELECT 1 FROM sessions WHERE session_id = 'a' FOR UPDATE"):
            async with asyncio.timeout(60):
                assert list(entries(await claim(server, limit=2))) == ["b"]
        assert list(entries(await claim(server, limit=2))) == ["a"]
