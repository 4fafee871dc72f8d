"""PostgreSQL restarts under agents of the stock SDK, and a worker is killed: all sessions end, stored once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
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
TURNS = 6


class Fleet:
    """Agents with keys of their own, each in one session. `turns`: how many were answered, `ended`: sessions."""

    def __init__(self, url: str) -> None:
        self.url, self.turns, self.ended = url, 0, 0
        self.seen: dict[str, list[str]] = {}
        self.failures: list[BaseException] = []
        self._http = httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=400))

    async def play(self, number: int, hold: asyncio.Event) -> None:
        session = await self._call("/rl/start_session", {"session_id": f"s{number}"}, ADMIN)
        sdk = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=session["api_key"], max_retries=8, timeout=120)
        messages: list[Any] = [{"role": "user", "content": f"I am {number}"}]
        async with sdk:
            for turn in range(TURNS):
                if turn == TURNS - 2:
                    await hold.wait()
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
                answer = await self._http.post(path, json=body, headers=headers)
                assert answer.status_code == 200, answer.text
                return answer.json()
            await asyncio.sleep(0.05)
        raise AssertionError(f"no answer to {path}")

    async def close(self) -> None:
        await self._http.aclose()


@contextlib.asynccontextmanager
async def playing(url: str) -> AsyncIterator[Fleet]:
    """Agents that play during the block, all but their last two turns; they have all ended after it."""
    fleet, hold = Fleet(url), asyncio.Event()
    agents = [asyncio.create_task(fleet.play(number, hold)) for number in range(AGENTS)]
    try:
        yield fleet
        hold.set()
        await asyncio.gather(*agents)
    finally:
        for agent in agents:
            agent.cancel()
        await fleet.close()


async def waiting(server: Process, postgres: Postgres) -> None:
    """Wait until calls wait for the database."""
    await until(lambda: "the database is away" in server.output)


async def answered(fleet: Fleet, share: float) -> None:
    await until(lambda: fleet.turns >= share * AGENTS * TURNS or fleet.ended == AGENTS)


def run(tmp_path: Path, disturb: Callable[[Process, Postgres, Fleet], Awaitable[None]]) -> None:
    postgres = Postgres()
    try:
        url = postgres.create_database()
        with server_process(tmp_path, *FLAGS, database_url=url) as server:
            seen = asyncio.run(_disturbed(server, postgres, disturb))
            assert "Traceback" not in server.output, server.output[-4000:]
        stored = execute(
            url, "SELECT session_id, id FROM interactions WHERE status = 'complete' ORDER BY session_id, seq"
        )
        by_session: dict[str, list[str]] = {}
        for name, turn in stored:
            by_session.setdefault(str(name), []).append(str(turn))
        assert by_session == seen and {len(turns) for turns in seen.values()} == {TURNS}
        assert execute(url, "SELECT DISTINCT status FROM sessions") == [("ended",)]
        assert execute(url, "SELECT count(*) FROM interactions WHERE reward IS NOT NULL") == [(AGENTS,)]
        check_database(url)
    finally:
        postgres.close()


async def _disturbed(
    server: Process, postgres: Postgres, disturb: Callable[[Process, Postgres, Fleet], Awaitable[None]]
) -> dict[str, list[str]]:
    async with playing(server.url) as fleet:
        await answered(fleet, 0.2)
        await disturb(server, postgres, fleet)
    assert fleet.ended == AGENTS
    return fleet.seen


def test_sessions_outlast_a_database_that_crashes_and_is_away_for_a_while(tmp_path: Path) -> None:
    async def away(server: Process, postgres: Postgres, fleet: Fleet) -> None:
        for _ in range(2):
            said = server.output.count("the database is away")
            await asyncio.to_thread(postgres.crash)
            await until(lambda said=said: server.output.count("the database is away") >= said + 2)
            await asyncio.sleep(float(os.environ.get("TOKENGROVE_TEST_AWAY_S", "0")))
            ready = await fleet._http.get("/ready")
            assert (ready.status_code, ready.json()["database"]) == (200, "away")
            await asyncio.to_thread(postgres.start)
            await until(lambda said=said: server.output.count("the database is back") >= said + 2)

    run(tmp_path, away)


def test_sessions_outlast_a_worker_that_is_killed_while_the_database_is_away(tmp_path: Path) -> None:
    async def killed(server: Process, postgres: Postgres, fleet: Fleet) -> None:
        await asyncio.to_thread(postgres.crash)
        await until(lambda: server.output.count("the database is away") >= 2)
        os.kill(workers_of(server)[1], signal.SIGKILL)
        await until(lambda: "is started again" in server.output)
        await asyncio.to_thread(postgres.start)

    run(tmp_path, killed)
