"""A proxy whose engine servers are killed at random, all of them at times: agents wait, and no token is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import httpx
import pytest

from tests.e2e.test_servers import AGENTS, Wire, agent, check_exact, proxy_of, served_more, state_of


async def waiting(http: httpx.AsyncClient, count: int) -> None:
    for _ in range(1200):
        if (await http.get("/engine")).json()["waiting"] >= count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError((await http.get("/engine")).json())


@pytest.mark.parametrize("seed", [11])
async def test_agents_do_not_notice_that_all_servers_die_and_some_return(tmp_path: Path, seed: int) -> None:
    rng, wires = random.Random(seed), [Wire() for _ in range(3)]
    try:
        with proxy_of(tmp_path, wires) as served:
            async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
                over = asyncio.Event()
                agents = [asyncio.create_task(agent(http, f"a{n}", n % 2 == 1, over)) for n in range(AGENTS)]
                await served_more(http, rng.randint(1, AGENTS))
                for wire in rng.sample(wires, 3):
                    await asyncio.to_thread(wire.kill)
                await waiting(http, AGENTS)
                refused = await http.get("/ready")
                assert refused.status_code == 503 and "no engine server is available" in refused.text
                assert (await http.get("/health")).status_code == 200
                for at in rng.sample(range(3), 2):
                    wires[at] = await asyncio.to_thread(Wire, wires[at].port)
                    await state_of(http, wires[at].url, "alive")
                assert (await http.get("/ready")).status_code == 200
                over.set()
                turns = await asyncio.gather(*agents)
                assert await check_exact(http) == sum(turns)
    finally:
        for wire in wires:
            wire.kill()
