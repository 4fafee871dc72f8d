"""A server of two worker processes: it starts whole or not at all, outlives its workers, and ends whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.e2e.load import check_database
from tests.e2e.processes import Process, run, server_process, told_of_stop
from tests.e2e.stalling import stalled
from tests.support import until, user

TWO = ("--workers", "2", "--engine", "scripted", "--migrate")
SLOW = ("--engine-arg", "tokens=40", "--engine-arg", "chunk=1", "--engine-arg", "delay_s=0.005")
ENDLESS = ("--engine-arg", "delay_s=600", "--shutdown-timeout-s", "600")
AGENTS = 6


def workers_of(server: Process) -> list[int]:
    """The process ids of the workers, in order of their start."""
    return [int(pid) for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()]


def ended(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    return True


class Agent:
    """Sends turn after turn, each over a connection of its own, and a lost one again. `seen`: ids of the replies."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self.seen: list[str] = []

    async def talk(self, over: asyncio.Event) -> None:
        messages: list[Any] = [user(f"I am {self._name}")]
        while not over.is_set():
            reply = await self._turn(messages)
            self.seen.append(reply["id"])
            messages += [reply["choices"][0]["message"], user("go on")]

    async def _turn(self, messages: list[Any]) -> Any:
        for attempt in range(200):
            headers = {"x-stainless-retry-count": str(attempt)}
            with contextlib.suppress(httpx.TransportError):
                async with httpx.AsyncClient(base_url=self._url, timeout=60) as http:
                    body = {"model": "m", "messages": messages}
                    reply = await http.post(f"/{self._name}/v1/chat/completions", json=body, headers=headers)
                    assert reply.status_code in (200, 503), reply.text
                    if reply.status_code == 200:
                        return reply.json()
            await asyncio.sleep(0.02)
        raise AssertionError("no worker answered")


async def answered(agents: list[Agent], more: int) -> None:
    """Wait until every agent has got so many replies more."""
    wanted = [len(agent.seen) + more for agent in agents]
    await until(lambda: all(len(agent.seen) >= count for agent, count in zip(agents, wanted, strict=True)))


async def until_shown(url: str, holds: Callable[[Any], bool]) -> None:
    """Wait until worker 0 shows a state of the engine of which `holds` is true."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for _ in range(1000):
            shown = await http.get("/engine")
            if shown.status_code == 200 and holds(shown.json()):
                return
            await asyncio.sleep(0.02)
    raise AssertionError(shown.text)


async def test_killed_workers_come_back_and_nothing_that_was_answered_is_lost(
    tmp_path: Path, postgres_url: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    watched = ("--metrics-port", str(port))
    with server_process(tmp_path, *TWO, *SLOW, *watched, database_url=postgres_url) as server:
        assert server.output.count("tokengrove serves") == 1 and f"  metrics   on port {port}\n" in server.output
        over, agents = asyncio.Event(), [Agent(server.url, f"agent-{n}") for n in range(AGENTS)]
        talks = asyncio.gather(*(agent.talk(over) for agent in agents))
        before = workers_of(server)
        for place in (0, 1):
            await answered(agents, 2)
            os.kill(before[place], signal.SIGKILL)
        await answered(agents, 2)
        await until_shown(server.url, lambda state: True)
        await until(lambda: len(workers_of(server)) == 2)
        after = workers_of(server)
        over.set()
        await talks
        assert not set(after) & set(before)
        await check_answered(server.url, agents)
        await check_counted(f"http://127.0.0.1:{port}/metrics", agents)
        server.terminate()
        assert await asyncio.to_thread(server.wait) == 0
        await until(lambda: all(map(ended, after)))
        assert server.output.count("was killed by SIGKILL") == 2 and "Traceback" not in server.output, server.output
    check_database(postgres_url)


async def check_answered(url: str, agents: list[Agent]) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for agent in agents:
            shown = (await http.get(f"/rl/sessions/{agent._name}")).json()
            done = [node["id"] for node in shown["interactions"] if node["status"] == "complete"]
            assert shown["begun_not_ended"] == 0
            assert agent.seen == [name for name in done if name in set(agent.seen)]
    ids = [name for agent in agents for name in agent.seen]
    assert len(set(ids)) == len(ids)


async def check_counted(url: str, agents: list[Agent]) -> None:
    """All workers answer at this port, and whichever does counts both of them, once both have started again."""
    async with httpx.AsyncClient(timeout=60) as http:
        for _ in range(500):
            shown = (await http.get(url, headers={"connection": "close"})).text  # a connection each time, of any worker
            assert f'tokengrove_stored_sessions{{state="active"}} {len(agents)}.0' in shown
            if "tokengrove_processes 2.0" in shown:
                return
            await asyncio.sleep(0.02)
    raise AssertionError(shown)


def test_workers_that_cannot_start_end_the_server_with_one_error(tmp_path: Path) -> None:
    ended = run("serve", "--port", "0", *TWO, "--database-url", "postgresql://nobody@127.0.0.1:1/none", cwd=tmp_path)
    assert ended.returncode == 1 and ended.stdout == ""
    errors = [line for line in ended.stderr.splitlines() if line.startswith("tokengrove: ")]
    assert len(errors) == 1 and "the database" in errors[0] and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.count("loading the tokenizer") <= 1, ended.stderr  # worker 1 may fail before worker 0 begins


async def test_a_second_signal_ends_all_workers_at_once(tmp_path: Path, postgres_url: str) -> None:
    with server_process(tmp_path, *TWO, *ENDLESS, database_url=postgres_url) as server:
        workers = workers_of(server)
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asked = asyncio.create_task(
                http.post("/s/v1/chat/completions", json={"model": "m", "messages": [user("")]})
            )
            await until_shown(server.url, lambda state: state["in_flight"] == 1)
            server.terminate()
            await until(lambda: refuses(server.url))
            assert not asked.done()
            server.terminate()
            assert await asyncio.to_thread(server.wait) == 0
            await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: all(map(ended, workers)))
        assert "Traceback" not in server.output, server.output
        assert told_of_stop(server) == [
            "stopping: 1 turn, up to 600 s",
            "stopping at once: a second signal came",
            "stopping: interrupted 1 turn",
            "stopped: 0 turns finished, 1 interrupted",
        ]


def test_clients_that_stall_do_not_hold_the_workers_and_each_line_names_its_worker(
    tmp_path: Path, postgres_url: str
) -> None:
    flags = (*TWO, "--shutdown-timeout-s", "600", "--log-format", "json")
    with server_process(tmp_path, *flags, database_url=postgres_url) as server:
        with stalled(server.url, 10):
            server.terminate()
            assert server.wait() == 0
        assert "Traceback" not in server.output, server.output
    lines = [json.loads(line) for line in server.output.splitlines()]
    assert {line.get("worker") for line in lines} == {0, 1, None}
    assert [line["workers"] for line in lines if line["event"] == "started"] == [2]


async def test_the_workers_of_a_killed_supervisor_end(tmp_path: Path, postgres_url: str) -> None:
    with server_process(tmp_path, *TWO, database_url=postgres_url) as server:
        workers = workers_of(server)
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: all(map(ended, workers)))


def refuses(url: str) -> bool:
    """Whether no worker listens any more."""
    address = urlsplit(url)
    try:
        socket.create_connection((address.hostname or "", address.port or 0)).close()
    except ConnectionRefusedError:
        return True
    return False
