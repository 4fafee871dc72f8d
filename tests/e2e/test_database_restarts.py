"""PostgreSQL goes away under agents of the stock SDK, and a worker is killed: all sessions end, stored once.

Agents wait before some of their turns, so that both workers have calls while the database is away.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai

from tests.conftest import Postgres
from tests.databases import execute
from tests.e2e.load import check_database
from tests.e2e.processes import Process, server_process
from tests.e2e.test_workers import workers_of
from tests.support import until

ADMIN = "admin-key-of-the-tests"
FLAGS = (
    *("--workers", "2", "--migrate", "--admin-key", ADMIN, "--engine", "scripted"),
    *("--engine-arg", "tokens=8", "--engine-arg", "chunk=1", "--engine-arg", "delay_s=0.01"),
)
AGENTS = int(os.environ.get("TOKENGROVE_TEST_AGENTS", "40"))
AWAY_S = float(os.environ.get("TOKENGROVE_TEST_AWAY_S", "0"))
TURNS = 6


class Fleet:
    """Agents with keys of their own, each in one session. `turns`: how many were answered, `ended`: sessions."""

    def __init__(self, url: str) -> None:
        self.url, self.turns, self.ended = url, 0, 0
        self._may_begin = [asyncio.Event() for _ in range(TURNS)]
        self.seen: dict[str, list[str]] = {}
        self.failures: list[BaseException] = []
        self.http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=400))

    def allow(self, turns: int) -> None:
        """Let each agent play its first `turns` turns."""
        for begin in self._may_begin[:turns]:
            begin.set()

    async def answered(self, share: float) -> None:
        """Wait until this share of all turns is answered."""
        await until(lambda: self.turns >= share * AGENTS * TURNS)

    async def play(self, number: int) -> None:
        session = await self._call("/rl/start_session", {"session_id": f"s{number}"}, ADMIN)
        sdk = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=session["api_key"], max_retries=8, timeout=120)
        messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        async with sdk:
            for turn in range(TURNS):
                await self._may_begin[turn].wait()
                reply = await sdk.chat.completions.create(model="m", messages=messages)
                self.seen.setdefault(f"s{number}", []).append(reply.id)
                self.turns += 1
                messages += [reply.choices[0].message, {"role": "user", "content": "go on"}]
        await self._call("/rl/set_reward", {"reward": 1.0}, session["control_key"])
        await self._call("/rl/end_session", {}, session["control_key"])
        self.ended += 1

    async def _call(self, path: str, body: Any, key: str) -> Any:
        """A control call, repeated with one Idempotency-Key if the connection is lost, as when a worker is killed."""
        headers = {"authorization": f"Bearer {key}", "idempotency-key": str(uuid.uuid4())}
        for _ in range(50):
            with contextlib.suppress(httpx.TransportError):
                answer = await self.http.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()
            await asyncio.sleep(0.05)
        raise AssertionError(f"no answer to {path}")

    async def close(self) -> None:
        await self.http.aclose()


@contextlib.asynccontextmanager
async def playing(url: str) -> AsyncIterator[Fleet]:
    """Agents that play their first two turns, and others when they are allowed to; they have all ended after it."""
    fleet = Fleet(url)
    fleet.allow(2)
    agents = [asyncio.create_task(fleet.play(number)) for number in range(AGENTS)]
    try:
        yield fleet
        fleet.allow(TURNS)
        await asyncio.gather(*agents)
    finally:
        for agent in agents:
            agent.cancel()
        await fleet.close()


async def both_say(server: Process, sentence: str, before: int = 0) -> None:
    """Wait until each worker has logged it; `before`: how often it was there already."""
    await until(lambda: server.output.count(sentence) >= before + 2)


@contextlib.contextmanager
def postgres_server() -> Iterator[Postgres]:
    postgres = Postgres()
    try:
        yield postgres
    finally:
        postgres.close()


def run(tmp_path: Path, url: str, disturb: Callable[[Process, Fleet], Awaitable[None]]) -> None:
    """Let agents play on a server with the database `url` while `disturb` runs, and compare what is stored."""
    with server_process(tmp_path, *FLAGS, database_url=url) as server:
        seen = asyncio.run(_disturbed(server, disturb))
        assert "Traceback" not in server.output, server.output[-4000:]
    stored = execute(url, "SELECT session_id, id FROM interactions WHERE status = 'complete' ORDER BY session_id, seq")
    by_session: dict[str, list[str]] = {}
    for name, turn in stored:
        by_session.setdefault(str(name), []).append(str(turn))
    assert by_session == seen and {len(turns) for turns in seen.values()} == {TURNS}
    assert execute(url, "SELECT DISTINCT status FROM sessions") == [("ended",)]
    assert execute(url, "SELECT count(*) FROM interactions WHERE reward IS NOT NULL") == [(AGENTS,)]
    check_database(url)


async def _disturbed(server: Process, disturb: Callable[[Process, Fleet], Awaitable[None]]) -> dict[str, list[str]]:
    async with playing(server.url) as fleet:
        await fleet.answered(0.2)
        await disturb(server, fleet)
    assert fleet.ended == AGENTS
    return fleet.seen


def test_sessions_outlast_a_database_that_crashes_and_is_away_for_a_while(tmp_path: Path) -> None:
    with postgres_server() as postgres:

        async def away(server: Process, fleet: Fleet) -> None:
            for crash in range(2):
                gone, back = (server.output.count(f"the database is {state}") for state in ("away", "back"))
                await asyncio.to_thread(postgres.crash)
                fleet.allow(4 + crash)
                await both_say(server, "the database is away", gone)
                await asyncio.sleep(AWAY_S)
                ready = await fleet.http.get("/ready")
                assert (ready.status_code, ready.json()["database"]) == (200, "away")
                await asyncio.to_thread(postgres.start)
                await both_say(server, "the database is back", back)
                await fleet.answered(0.5)

        run(tmp_path, postgres.create_database(), away)


def test_sessions_outlast_a_worker_that_is_killed_while_the_database_is_away(tmp_path: Path) -> None:
    with postgres_server() as postgres:

        async def killed(server: Process, fleet: Fleet) -> None:
            await asyncio.to_thread(postgres.crash)
            fleet.allow(4)
            await both_say(server, "the database is away")
            os.kill(workers_of(server)[1], signal.SIGKILL)
            await until(lambda: "is started again" in server.output)
            await asyncio.to_thread(postgres.start)

        run(tmp_path, postgres.create_database(), killed)


def test_sessions_outlast_a_primary_that_is_lost_and_whose_standby_is_promoted(tmp_path: Path) -> None:
    with postgres_server() as primary:
        url = primary.create_database()
        standby = primary.standby()
        try:

            async def promoted(server: Process, fleet: Fleet) -> None:
                await asyncio.to_thread(primary.crash)
                fleet.allow(4)
                await both_say(server, "the database is away")
                await asyncio.sleep(AWAY_S)
                await asyncio.to_thread(standby.promote)
                await both_say(server, "the database is back")

            run(tmp_path, primary.or_standby(url, standby), promoted)
        finally:
            standby.close()
