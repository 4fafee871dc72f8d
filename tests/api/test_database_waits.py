"""While the database is away turns and control calls wait for it, and each is done once when it is back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from psycopg import OperationalError
from sqlalchemy import Connection
from starlette.requests import ClientDisconnect

from proxy.api.replies import begin_turns
from proxy.protocols.chat.protocol import ChatProtocol
from proxy.store import writer
from proxy.store.absence import Patience
from proxy.store.sql.pipeline import pipelined
from proxy.store.sql.statement import as_sqlalchemy
from proxy.types import TurnRequest
from tests.api.test_failover import CHAT, QUESTION, held
from tests.api.test_replicas import replicas
from tests.databases import execute, stalled_commits
from tests.postgres_link import Link, linked
from tests.support import Server, says, serving, until, user

BODY = {"model": "m", "messages": [user(QUESTION)]}


@pytest.fixture
def link(postgres_url: str) -> Iterator[Link]:
    """A link to a new database at the newest revision."""
    with linked(postgres_url) as link:
        yield link


def waiting(server: Server) -> int:
    return server.app.state.store.database.write._waiting()  # type: ignore[no-any-return]


def away(server: Server) -> bool:
    return server.app.state.store.database.absence.since is not None


def asked(server: Server, path: str, body: Any, **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(server.post(path, body, **more))


async def ready(server: Server) -> tuple[int, str | None]:
    response = await server.http.get("/ready")
    return response.status_code, response.json().get("database")


@pytest.mark.parametrize("stream", [False, True])
async def test_turns_and_control_calls_wait_and_are_done_once(tmp_path: Path, link: Link, stream: bool) -> None:
    async with replicas(tmp_path, link.url, says("zero", "one", "late"), says("other")) as (one, two):
        await one.chat([user("hi")])
        gate = held(one)
        turn = asked(one, CHAT, {**BODY, "stream": stream})
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 1)
        link.set_down(True)
        gate.set()
        await until(lambda: away(one))
        calls = [
            asked(one, CHAT, {"model": "m", "messages": [user("late")]}),
            asked(two, "/rl/start_session", {"session_id": "new"}),
            asked(one, "/s/rl/set_reward", {"reward": 1.0, "turn": 0}),
            asked(two, "/rl/grant_capacity", {"n": 3}),
        ]
        await until(lambda: waiting(one) >= 3 and waiting(two) >= 2)
        assert await ready(one) == (200, "away") and not any(call.done() for call in (turn, *calls))
        metrics = (await one.http.get("/metrics")).text
        assert "tokengrove_database_waiting 0.0" not in metrics and "tokengrove_database_waiting " in metrics
        link.set_down(False)
        answers = await asyncio.gather(turn, *calls)
        assert [answer.status_code for answer in answers] == [200] * 5, [answer.text for answer in answers]
        assert "store_unavailable" not in answers[0].text and answers[4].json() == {"capacity": 3}
        assert await ready(one) == await ready(two) == (200, "ready")
        tree = await two.tree()
        assert [(turn["status"], turn["reward"]) for turn in tree] == [
            ("complete", 1.0), ("complete", None), ("complete", None)]  # fmt: skip
        waited = one.app.state.store.metrics.waited.by
        assert waited["changes", "done"] >= 2 and waited["reads", "done"] >= 1
        assert (waited["changes", "refused"], waited["reads", "refused"]) == (0, 0)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("known", [False, True], ids=["new session", "known session"])
async def test_a_turn_whose_connection_is_lost_at_the_commit_is_stored_once(
    tmp_path: Path, link: Link, after: bool, known: bool
) -> None:
    async with replicas(tmp_path, link.url, *([says("zero", "one")] if known else [says("one")])) as (one,):
        if known:
            await one.chat([user("hi")])
        link.after, link.cut_at = after, QUESTION.encode()
        reply = await one.post(CHAT, BODY)
        assert link.cut.is_set() and reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["message"]["content"] == "one"
        tree = await one.tree()
        assert [turn["status"] for turn in tree] == ["complete"] * (1 + known)
        assert execute(link.behind, "SELECT count(*) FROM intents") == [(0,)]


async def test_a_turn_is_stored_once_if_the_driver_does_not_say_that_the_connection_is_lost_at_the_commit(
    tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("zero", "one"), database_url=link.url) as server:
        await server.chat([user("hi")])
        await until(lambda: execute(link.behind, "SELECT * FROM intents, unreplied") == [])
        broken: list[None] = []

        @contextmanager
        def breaking(connection: Connection) -> Iterator[None]:
            with pipelined(connection):
                yield
            stored = execute(link.behind, "SELECT count(*) FROM interactions")
            if stored == [(2,)] and not broken:
                broken.append(None)
                error = OperationalError("cannot exit pipeline mode while busy")
                raise as_sqlalchemy(connection, "pipeline", error) from error

        monkeypatch.setattr(writer, "pipelined", breaking)
        assert (await server.post(CHAT, BODY)).status_code == 200
        assert broken and len(await server.tree()) == 2


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
async def test_control_calls_whose_connection_is_lost_at_the_commit_are_done_once(
    tmp_path: Path, link: Link, after: bool
) -> None:
    async with replicas(tmp_path, link.url, says("zero", "one"), says()) as (one, two):
        await one.chat([user("hi")])

        async def cut(marker: bytes, path: str, body: Any) -> Any:
            link.cut.clear()
            link.after, link.cut_at = after, marker
            answer = await one.post(path, body)
            assert link.cut.is_set() and answer.status_code == 200, answer.text
            return answer.json()

        assert (await cut(b"capacity", "/rl/grant_capacity", {"n": 2}))["capacity"] == 2
        assert (await cut(b"capacity", "/rl/grant_capacity", {"n": 2}))["capacity"] == 4
        started = await cut(b"INSERT INTO sessions", "/rl/start_session", {"session_id": "x", "api_key": "k" * 20})
        assert (started["session_id"], started["api_key"]) == ("x", "k" * 20)
        await cut(b"UPDATE interactions", "/s/rl/set_reward", {"reward": 1.5})
        await cut(b"the-reason-of-the-end", "/s/rl/end_session", {"exit_reason": "the-reason-of-the-end"})
        claim = {"limit": 1, "claim_id": "c"}
        assert (await cut(b"claimed_by", "/trajectories/claim", claim))["sessions"][0]["session_id"] == "s"
        assert await cut(b"acknowledged_at", "/trajectories/acknowledge", {"claim_id": "c"})
        assert [turn["reward"] for turn in await two.tree()] == [1.5]
        assert execute(link.behind, "SELECT count(*) FROM sessions") == [(2,)]
        assert len(execute(link.behind, "SELECT * FROM commit_marks")) == 1
        gone = await one.http.request("DELETE", "/rl/sessions/x")
        assert gone.status_code == 200


async def test_a_commit_that_the_database_is_still_at_is_waited_for(tmp_path: Path, link: Link) -> None:
    """The connection is lost, and its transaction goes on for a while."""
    async with replicas(tmp_path, link.url, says("zero", "one")) as (one,):
        await one.chat([user("hi")])
        with stalled_commits(link.behind):
            turn = asked(one, CHAT, BODY)
            stalled = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'advisory'"
            await until(lambda: execute(link.behind, stalled) != [])
            link.set_down(True)
            link.set_down(False)
            waits = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND wait_event <> 'advisory'"
            await until(lambda: turn.done() or execute(link.behind, waits) != [])
            assert not turn.done()
        assert (await turn).json()["choices"][0]["message"]["content"] == "one"
        assert len(await one.tree()) == 2


async def test_who_waits_for_too_long_gets_503_and_so_do_those_after_him(tmp_path: Path, link: Link) -> None:
    async with serving(tmp_path, says("zero"), database_url=link.url, database_wait_s=0.3) as server:
        await server.chat([user("hi")])
        link.set_down(True)
        for path, body in ((CHAT, BODY), ("/s/rl/set_reward", {"reward": 1.0}), ("/rl/grant_capacity", {})):
            refused = await server.post(path, body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert (await server.http.get("/ready")).status_code == 503
        link.set_down(False)
        assert await ready(server) == (200, "ready")
        await server.ok("/s/rl/set_reward", {"reward": 1.0})


async def test_a_stop_ends_the_wait(tmp_path: Path, link: Link) -> None:
    async with serving(tmp_path, says("zero", "one"), database_url=link.url, database_wait_s=3600.0) as server:
        await server.chat([user("hi")])
        gate = held(server)
        turn = asked(server, CHAT, BODY)
        await until(lambda: len(execute(link.behind, "SELECT * FROM intents")) == 1)
        link.set_down(True)
        gate.set()
        calls = [turn, asked(server, "/s/rl/set_reward", {"reward": 1.0})]
        await until(lambda: waiting(server) >= 2)
        server.app.state.store.database.absence.stop()
        for call in calls:
            assert (await call).status_code == 503


async def test_no_more_wait_than_there_is_room_for(tmp_path: Path, link: Link) -> None:
    async with serving(tmp_path, says("zero"), database_url=link.url) as server:
        await server.chat([user("hi")])
        server.app.state.store.database.absence.patience = Patience(3600.0, most_waiting=4)
        link.set_down(True)
        calls = [asked(server, "/rl/grant_capacity", {})]
        await until(lambda: away(server))
        calls += [asked(server, "/rl/grant_capacity", {}) for _ in range(11)]
        await until(lambda: sum(call.done() for call in calls) >= 8)  # notes of the turn may wait, too
        assert await ready(server) == (200, "away")
        link.set_down(False)
        answers = await asyncio.gather(*calls)
        refused = [answer for answer in answers if answer.status_code == 503]
        assert "too many calls wait" in refused[0].text and len(refused) < 12
        assert execute(link.behind, "SELECT available FROM capacity") == [(12 - len(refused),)]


async def test_a_client_that_leaves_waits_no_longer(tmp_path: Path, link: Link) -> None:
    async with serving(tmp_path, says("zero"), database_url=link.url) as server:
        await server.chat([user("hi")])
        link.set_down(True)
        reads = [asyncio.create_task(server.http.get("/rl/sessions/s")) for _ in range(3)]
        await until(lambda: server.app.state.store.database.write.reading == 3)
        for read in reads:
            read.cancel()
        await until(lambda: server.app.state.store.database.write.reading == 0)
        link.set_down(False)
        assert len(await server.tree()) == 1


async def test_a_turn_whose_client_leaves_before_it_begins_is_not_sampled(tmp_path: Path, link: Link) -> None:
    async with serving(tmp_path, says("zero"), database_url=link.url) as server:
        await server.chat([user("hi")])
        session = server.app.state.registry.find("s")
        link.set_down(True)
        seen = asyncio.create_task(server.http.get("/rl/sessions/s"))
        await until(lambda: away(server))
        left, sent = asyncio.Event(), asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def begin(*_: Any, **__: Any) -> Any:
            sent.set()
            await server.app.state.registry.refresh(session)

        turns = server.app.state.turns
        turns.begin = begin
        asking = asyncio.create_task(begin_turns(receive, turns, session, TurnRequest, ChatProtocol()))  # type: ignore[arg-type]
        await sent.wait()
        left.set()
        with pytest.raises(ClientDisconnect):
            await asking
        link.set_down(False)
        assert (await seen).status_code == 200
