"""Servers that are killed, stopped and paused, and lose workers, while agents and trainers use them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.conftest import Postgres
from tests.e2e.load import Load, Refused, check_database, outputs_at
from tests.torture.processes.place import Place

_SCRIPTED = (
    *("--engine", "scripted", "--engine-arg", "tokens=40", "--engine-arg", "chunk=4"),
    "--replay",
    "top_logprobs",
)
_GAUGES = (
    *("tokengrove_in_flight", "tokengrove_waiting", "tokengrove_engine_paused", "tokengrove_body_bytes"),
    "tokengrove_queued_changes",
)


@asynccontextmanager
async def _agents(place: Place, url: str, number: int) -> AsyncIterator[Load]:
    """Run agents during the block; some leave in the middle of their turns and come again."""
    load = Load(random.Random(place.chance.random()), heard=place.answered)

    async def talk(http: httpx.AsyncClient, name: str) -> None:
        while not load.stopped and not load.gone:
            talking = asyncio.create_task(load.talk(http, name, stream=load.chance.random() < 0.5))
            await asyncio.wait(
                [talking],
                timeout=load.chance.uniform(0.01, 1.0) if place.leaving and load.chance.random() < 0.5 else None,
            )
            if not talking.done():
                talking.cancel()
                await asyncio.wait([talking])
            elif not talking.cancelled():
                talking.result()

    async with httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=number)) as http:
        talks = [asyncio.create_task(talk(http, f"s{k}")) for k in range(number)]
        try:
            yield load
        finally:
            load.stopped = True
            await asyncio.gather(*talks)


async def _idle(place: Place, url: str) -> None:
    """Wait until all gauges of what runs are zero, and stop the server, which finds nothing that runs."""
    await _until_zero(url)
    told = await place.stop()
    assert told[0] == "stopping: nothing runs", told


async def _until_zero(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        values: dict[str, str] = {}
        for _ in range(600):
            await asyncio.sleep(0.05)
            try:
                lines = (await http.get("/metrics")).text.splitlines()
            except httpx.TransportError:  # its workers start again
                continue
            values = dict(line.rsplit(" ", 1) for line in lines if line.split(" ")[0] in _GAUGES)
            if all(float(value) == 0.0 for value in values.values()):
                assert set(values) == set(_GAUGES)
                return
    raise AssertionError(f"what ran has ended, and the gauges are {values}")


async def _check_stored(url: str, seen: dict[str, str]) -> None:
    await asyncio.to_thread(check_database, url)
    stored = await outputs_at(url)
    missing = {key: text for key, text in seen.items() if stored.get(key) != text}
    assert not missing, f"replies that clients had whole are not stored: {missing}"


async def servers_that_end(place: Place) -> None:
    """Servers are killed or stopped while turns run, and start again: no reply that a client had whole is lost."""
    seen: dict[str, str] = {}
    place.leaving = place.chance.random() < 0.5
    for _ in range(place.chance.randint(1, 3)):
        async with place.server(*_SCRIPTED) as url, _agents(place, url, 6) as load:
            await place.end(0.6)
            load.stopped = True
        seen |= load.seen
    await _check_stored(place.database, seen)


async def workers_that_are_killed(place: Place) -> None:
    """The workers of a server are killed one by one while turns run: their agents go on at the others."""
    postgres = Postgres()
    try:
        with postgres.database() as database:
            async with place.server(*_SCRIPTED, "--workers", "2", "--migrate", database_url=database) as url:
                seen = dict[str, str]()
                for _ in range(2):
                    async with _agents(place, url, 6) as load:
                        await place.some_time(0.5)
                        assert place.process is not None
                        os.kill(place.chance.choice(_children(place.process.pid)), signal.SIGKILL)
                        await place.some_time(0.5)
                        load.stopped = True
                    seen |= load.seen
                await _idle(place, url)
            await _check_stored(database, seen)
    finally:
        postgres.close()


async def pauses_and_weights(place: Place) -> None:
    """A trainer pauses the engine and gives it weights while turns run, and some clients leave."""
    async with place.server(*_SCRIPTED) as url:
        async with _agents(place, url, 6) as load, httpx.AsyncClient(base_url=url, timeout=60) as http:
            for _ in range(place.chance.randint(2, 6)):
                mode = place.chance.choice(["in_place", "retract", "abort", "drain"])
                if place.chance.random() < 0.5:
                    await _ok(http, "/engine/update_weights", {"path": "w", "mode": mode})
                else:
                    await _ok(http, "/engine/pause_generation", {"mode": mode})
                    await place.some_time(0.1)
                    await _ok(http, "/engine/continue_generation", {})
                await place.some_time(0.1)
        assert not load.gone, "a connection was cut"
        await _idle(place, url)
    await _check_stored(place.database, load.seen)


async def trainers_that_race(place: Place) -> None:
    """Two trainers claim and acknowledge ended sessions while their server is killed: each is acknowledged once."""
    names = {f"s{number}" for number in range(12)}
    acknowledged, unheard = dict[str, str](), dict[str, list[str]]()
    async with place.server(*_SCRIPTED) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        for name in sorted(names):
            body = {"model": "m", "messages": [{"role": "user", "content": name}], "max_tokens": 3}
            await _ok(http, f"/{name}/v1/chat/completions", body)
            await _ok(http, f"/{name}/rl/end_session", {})
    for life in range(3):
        async with place.server(*_SCRIPTED) as url:
            await _repeat(url, acknowledged, unheard)
            trainers = [asyncio.create_task(_train(place, url, f"t{k}.{life}", acknowledged, unheard)) for k in "ab"]
            if life < 2:
                await place.end(0.3, most_answers=3)
            await asyncio.gather(*trainers)
    assert acknowledged.keys() == names, f"nobody acknowledged {names - acknowledged.keys()}"
    await asyncio.to_thread(check_database, place.database)


async def _repeat(url: str, acknowledged: dict[str, str], unheard: dict[str, list[str]]) -> None:
    """Acknowledge again what the last server was asked to without an answer: it may have done so."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for claim, held in unheard.items():
            body = {"claim_id": claim, "session_ids": held}
            done = (await _ok(http, "/trajectories/acknowledge", body))["acknowledged"]
            acknowledged.update(dict.fromkeys(done, claim))
    unheard.clear()


async def _train(
    place: Place, url: str, name: str, acknowledged: dict[str, str], unheard: dict[str, list[str]]
) -> None:
    """Claim and acknowledge until nothing is left or the server is gone."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for number in range(1000):
            claim = f"{name}.{number}"
            try:
                body = {"claim_id": claim, "limit": place.chance.randint(1, 3), "lease_s": 0.5, "wait_s": 1.0}
                held = [session["session_id"] for session in (await _ok(http, "/trajectories/claim", body))["sessions"]]
                if not held:
                    return
                assert not acknowledged.keys() & set(held), f"{held} were acknowledged, and are claimed"
                unheard[claim] = held
                body = {"claim_id": claim, "session_ids": held}
                done = (await _ok(http, "/trajectories/acknowledge", body))["acknowledged"]
            except (httpx.TransportError, Refused):
                return
            del unheard[claim]
            place.answered()
            for session in done:
                assert session not in acknowledged, f"{session} was acknowledged twice"
                acknowledged[session] = claim


async def models_that_stop(place: Place) -> None:
    """A server with the built-in model in its process is stopped or killed while it samples."""
    place.leaving = place.chance.random() < 0.5
    async with place.server("--engine", "transformers") as url, _agents(place, url, 3) as load:
        await place.end(3.0, most_answers=6)
        load.stopped = True
    await _check_stored(place.database, load.seen)


async def _ok(http: httpx.AsyncClient, path: str, body: Any) -> Any:
    answer = await http.post(path, json=body)
    if answer.status_code == 503:
        raise Refused(answer.text)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
