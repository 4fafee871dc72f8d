"""A proxy in front of three engine servers, whose processes are killed and restarted while agents run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.processes import Process, fork, server_process
from tests.engines.scripts import following
from tests.engines.wire import serve as serve_wire
from tests.exports import entries
from tests.support import free_port

START_TIMEOUT_S = 60.0
TURNS, AGENTS, TOKENS = 4, 8, 60


class Wire:
    """A simulated SGLang server in a separate process; it takes 5 ms per token."""

    def __init__(self, port: int | None = None, kind: str = "sglang") -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process = fork(serve_wire, kind, self.port, 0.005)
        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(httpx.HTTPError):
                httpx.get(f"{self.url}/v1/models", trust_env=False)
                return
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)

    async def fail(self, failing: bool) -> None:
        """Answer every request to generate with 500, or end that."""
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.post(f"{self.url}/wire/fails", json=failing)).status_code == 200

    async def hold_updates(self, holds: bool) -> None:
        """Finish no weight update, or end that."""
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.post(f"{self.url}/wire/holds_updates", json=holds)).status_code == 200

    async def until_updating(self) -> None:
        """Wait until a weight update has begun."""
        async with httpx.AsyncClient(trust_env=False) as http:
            for _ in range(6000):
                if (await http.get(f"{self.url}/wire/updating")).json():
                    return
                await asyncio.sleep(0.01)
        raise AssertionError("no weight update has begun")

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


@pytest.fixture
def wires() -> Iterator[list[Wire]]:
    started = [Wire() for _ in range(3)]
    yield started
    for wire in started:
        wire.kill()


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def proxy_of(folder: Path, wires: list[Wire]) -> Iterator[Process]:
    with server_process(folder, "--engine", ",".join(wire.url for wire in wires)) as served:
        yield served


async def agent(http: httpx.AsyncClient, name: str, stream: bool, over: asyncio.Event | None = None) -> int:
    """Run a few turns, and more until `over` if given; return their number. Any status but 200 is a failure."""
    messages: list[Any] = [{"role": "user", "content": f"I am {name}."}]
    turn = 0
    while turn < TURNS or (over is not None and not over.is_set()):
        turn += 1
        body = {"model": "m", "messages": messages, "max_tokens": TOKENS, "stream": stream}
        response = await http.post(f"/{name}/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        if stream:
            assert '"error"' not in response.text and response.text.rstrip().endswith("[DONE]")
            messages = [*messages, {"role": "user", "content": f"Again {turn}."}]
        else:
            reply = response.json()["choices"][0]["message"]
            messages = [*messages, reply, {"role": "user", "content": f"Go on {turn}."}]
    return turn


async def check_exact(http: httpx.AsyncClient) -> int:
    """Check that every sampled token is the same as without a killed server; return the number of turns."""
    answer = (await http.post("/export_trajectories", json={"layout": "individual"})).json()
    for sample in answer["samples"]:
        (start, end), ids = sample["turns"][0]["span"], sample["input_ids"]
        assert end - start == TOKENS
        assert ids[start:end] == following(ids[:start], TOKENS)
    assert all(entry["complete"] for entry in entries(answer).values())
    return len(answer["samples"])


async def servers_of(http: httpx.AsyncClient) -> dict[str, Any]:
    return {shown["url"]: shown for shown in (await http.get("/engine/servers")).json()["servers"]}


async def state_of(http: httpx.AsyncClient, url: str, state: str) -> None:
    for _ in range(600):
        if (await servers_of(http)).get(url, {}).get("state") == state:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"{url} never became {state}: {await servers_of(http)}")


async def served_more(http: httpx.AsyncClient, count: int) -> None:
    """Wait until the servers have answered `count` more requests."""
    before = sum(shown["served"] for shown in (await servers_of(http)).values())
    for _ in range(1200):
        if sum(shown["served"] for shown in (await servers_of(http)).values()) >= before + count:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("no request was answered")


async def test_agents_do_not_notice_servers_that_die_and_return(tmp_path: Path, wires: list[Wire]) -> None:
    rng = random.Random(3)
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            over = asyncio.Event()
            agents = [asyncio.create_task(agent(http, f"a{n}", stream=n % 2 == 1, over=over)) for n in range(AGENTS)]
            for _ in range(3):
                await served_more(http, 2)
                victim = rng.choice(wires)
                await asyncio.to_thread(victim.kill)
                await state_of(http, victim.url, "ejected")
                wires[wires.index(victim)] = await asyncio.to_thread(Wire, victim.port)
                await state_of(http, victim.url, "alive")
            over.set()
            turns = await asyncio.gather(*agents)
            assert await check_exact(http) == sum(turns)


async def test_servers_join_and_leave_while_agents_run(tmp_path: Path, wires: list[Wire]) -> None:
    with proxy_of(tmp_path, wires[:1]) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            agents = [asyncio.create_task(agent(http, f"a{n}", stream=False)) for n in range(AGENTS)]
            assert (await http.post("/engine/servers", json={"url": wires[1].url})).status_code == 200
            again = await http.post("/engine/servers", json={"url": wires[1].url})
            assert again.status_code == 400 and "already" in again.text
            nobody = await http.post("/engine/servers", json={"url": f"http://127.0.0.1:{free_port()}"})
            assert nobody.status_code == 400 and "cannot join" in nobody.text
            later = [asyncio.create_task(agent(http, f"b{n}", stream=False)) for n in range(AGENTS)]
            await served_more(http, 2)
            gone = await http.request("DELETE", "/engine/servers", json={"url": wires[0].url})
            assert gone.status_code == 200
            await asyncio.gather(*agents, *later)
            assert list(await servers_of(http)) == [wires[1].url]
            assert (await servers_of(http))[wires[1].url]["served"] >= AGENTS
            assert await check_exact(http) == 2 * AGENTS * TURNS


async def test_a_server_that_returns_gets_the_weights_of_the_others(tmp_path: Path, wires: list[Wire]) -> None:
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            wires[0].kill()
            await state_of(http, wires[0].url, "ejected")
            updated = await http.post("/engine/update_weights", json={"path": "/weights/7", "version": 7})
            assert updated.json()["version"] == 7
            wires[0] = await asyncio.to_thread(Wire, wires[0].port)
            await state_of(http, wires[0].url, "alive")
            assert {shown["version"] for shown in (await servers_of(http)).values()} == {7}
            await asyncio.gather(*(agent(http, f"a{n}", stream=False) for n in range(6)))
            samples = (await http.post("/export_trajectories", json={})).json()["samples"]
            assert {version for sample in samples for version in sample["versions"]} == {-1, 7}
            refused = await http.post("/engine/update_weights", json={"path": "/weights/missing"})
            assert refused.status_code == 400 and "no such folder" in refused.text
            assert (await http.get("/engine")).json()["paused"] is None


async def test_the_proxy_is_not_ready_while_no_server_is_alive(tmp_path: Path, wires: list[Wire]) -> None:
    with proxy_of(tmp_path, wires[:1]) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            assert (await http.get("/ready")).json()["status"] == "ready"
            wires[0].kill()
            await state_of(http, wires[0].url, "ejected")
            refused = await http.get("/ready")
            assert refused.status_code == 503 and "no engine server is available" in refused.json()["error"]["message"]
            assert wires[0].url in (await http.get("/engine/servers")).text
            assert (await http.get("/health")).status_code == 200
            wires[0] = await asyncio.to_thread(Wire, wires[0].port)
            await state_of(http, wires[0].url, "alive")
            assert (await http.get("/ready")).status_code == 200


async def test_agents_do_not_notice_a_server_that_fails_fast_and_it_draws_few_turns(
    tmp_path: Path, wires: list[Wire]
) -> None:
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            over = asyncio.Event()
            agents = [asyncio.create_task(agent(http, f"a{n}", stream=n % 2 == 1, over=over)) for n in range(AGENTS)]
            await served_more(http, 2)
            broken = wires[0]
            await broken.fail(True)
            await state_of(http, broken.url, "failing")
            before = await servers_of(http)
            await served_more(http, 2 * AGENTS)
            after = await servers_of(http)
            assert after[broken.url]["served"] == before[broken.url]["served"]
            assert "illegal memory access" in after[broken.url]["failure"] and after[broken.url]["state"] == "failing"
            assert 'tokengrove_engine_servers{state="failing"} 1.0' in (await http.get("/metrics")).text
            await broken.fail(False)
            await state_of(http, broken.url, "alive")
            over.set()
            turns = await asyncio.gather(*agents)
            assert await check_exact(http) == sum(turns)


async def test_a_session_stays_on_its_server(tmp_path: Path, wires: list[Wire]) -> None:
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            for name in ("x", "y", "z"):
                await agent(http, name, stream=False)
            shown = (await servers_of(http)).values()
            assert sorted(server["served"] for server in shown) == [TURNS, TURNS, TURNS]
            assert [server["session_count"] for server in shown] == [1, 1, 1]


@pytest.mark.parametrize("inside", ["a pause", "a weight update"])
async def test_servers_are_continued_after_a_kill_of_the_proxy_inside_a_pause(
    tmp_path: Path, wires: list[Wire], inside: str
) -> None:
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            if inside == "a pause":
                assert (await http.post("/engine/pause_generation")).status_code == 200
                served.kill()
            else:
                await wires[0].hold_updates(True)
                updating = asyncio.create_task(http.post("/engine/update_weights", json={"path": "/weights/3"}))
                await wires[0].until_updating()
                served.kill()
                with pytest.raises(httpx.TransportError):
                    await updating
    with proxy_of(tmp_path, wires) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            assert (await http.get("/engine")).json()["paused"] is None
            await asyncio.gather(*(agent(http, f"a{n}", stream=n % 2 == 1) for n in range(4)))
            assert await check_exact(http) == 4 * TURNS
        assert served.output.count("ended without that") == len(wires), served.output


async def test_an_update_of_vllm_servers_that_a_kill_of_the_proxy_interrupted_is_finished(tmp_path: Path) -> None:
    wires = [Wire(kind="vllm") for _ in range(2)]
    try:
        with proxy_of(tmp_path, wires) as served:
            async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
                await wires[0].hold_updates(True)
                updating = asyncio.create_task(http.post("/engine/update_weights", json={"path": "/weights/3"}))
                await wires[0].until_updating()
                served.kill()
                with pytest.raises(httpx.TransportError):
                    await updating
        await wires[0].hold_updates(False)
        with proxy_of(tmp_path, wires) as served:
            async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
                await asyncio.gather(*(agent(http, f"a{n}", stream=n % 2 == 1) for n in range(4)))
                assert await check_exact(http) == 4 * TURNS
                shown = await servers_of(http)
            assert [(server["state"], server["version"]) for server in shown.values()] == [("alive", 1)] * 2, shown
    finally:
        for wire in wires:
            wire.kill()


async def test_workers_continue_the_servers_that_a_kill_of_all_of_them_left_paused(
    tmp_path: Path, wires: list[Wire], postgres_url: str
) -> None:
    flags = ("--workers", "2", "--engine", wires[0].url, "--port", str(free_port()))
    with server_process(tmp_path, *flags, database_url=postgres_url) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            assert (await http.post("/engine/pause_generation")).status_code == 200
        for pid in (served.pid, *children_of(served.pid)):
            os.kill(pid, signal.SIGKILL)
        served.wait()
    with server_process(tmp_path, *flags, database_url=postgres_url) as served:
        async with httpx.AsyncClient(base_url=served.url, timeout=120, trust_env=False) as http:
            assert await agent(http, "a", stream=False) == TURNS
        assert served.output.count("ended without that") == 1, served.output
