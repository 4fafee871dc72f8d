"""Real routers in front of two real vLLM servers: they are refused by name, and their servers work without them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.interface import PauseMode
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from tests.engines.vllm_process import FULL, VARIABLE, VllmProcess, build_wide_model
from tests.support import free_port
from tokengrove.errors import ConfigurationError

pytestmark = [pytest.mark.engines, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ROUTERS = {
    "vllm-router": ("TOKENGROVE_TEST_VLLM_ROUTER", ["--policy", "round_robin"]),
    "smg": ("TOKENGROVE_TEST_SMG", ["launch", "--backend", "vllm", "--policy", "round_robin"]),
}
"""For each router the variable that names its executable, and its arguments."""

START_TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    variables = [variable for variable, _ in ROUTERS.values()]
    if VARIABLE not in os.environ or not any(variable in os.environ for variable in variables):
        pytest.skip(f"{VARIABLE} names no Python with vLLM, or none of {', '.join(variables)} names a router")
    built = [tmp_path_factory.mktemp(f"wide-{version}") for version in range(2)]
    for seed, folder in enumerate(built):
        build_wide_model(folder, seed=seed)
    return built


@pytest.fixture(scope="module")
def servers(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    logs = tmp_path_factory.mktemp("logs")
    started = [VllmProcess(folders[0], logs / str(number), *FULL) for number in range(2)]
    try:
        for server in started:
            server.wait_ready()
        yield sorted(server.url for server in started)
    finally:
        for server in started:
            server.kill()


@contextlib.contextmanager
def routing(name: str, servers: list[str], log: Path) -> Iterator[str]:
    """Run a router in front of the servers; yield its URL once both are healthy."""
    variable, arguments = ROUTERS[name]
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name the executable of {name}")
    port, ports = free_port(), ["--prometheus-port", str(free_port())]
    command = [os.environ[variable], *arguments, "--worker-urls", *servers, "--host", "127.0.0.1", *ports]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_ready(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_ready(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            answer = httpx.get(f"{url}/readiness", timeout=2.0, trust_env=False)
            if answer.status_code == 200 and answer.json()["healthy_workers"] == 2:
                return
        time.sleep(0.2)
    raise AssertionError(f"the router at {url} did not start")


def told(servers: list[str], path: str, field: str) -> list[Any]:
    return [httpx.get(url + path, trust_env=False).json()[field] for url in servers]


def paused(servers: list[str]) -> list[bool]:
    return told(servers, "/is_paused", "is_paused")


def order(url: str) -> None:
    httpx.post(url, trust_env=False).raise_for_status()


async def test_vllm_router_passes_a_pause_to_one_server(servers: list[str], tmp_path: Path) -> None:
    with routing("vllm-router", servers, tmp_path / "router.log") as url:
        order(f"{url}/pause?mode=keep&clear_cache=false")
        try:
            assert sorted(paused(servers)) == [False, True]
        finally:
            for server in servers:
                order(f"{server}/resume")


@pytest.mark.parametrize("name", ROUTERS)
async def test_a_router_is_refused_and_its_servers_are_named(name: str, servers: list[str], tmp_path: Path) -> None:
    with routing(name, servers, tmp_path / "router.log") as url:
        pool = Pool([url], connect(640, None), start_timeout_s=60.0)
        with pytest.raises(ConfigurationError, match=f"{url} is a router.*--engine {','.join(servers)}$"):
            await pool.start()
        await pool.close()


async def test_the_servers_themselves_all_get_pauses_and_weights(servers: list[str], folders: list[Path]) -> None:
    pool = Pool(servers, connect(640, None), start_timeout_s=60.0)
    await pool.start()
    try:
        await pool.pause(PauseMode.ABORT)
        assert paused(servers) == [True, True]
        assert await pool.update_weights(str(folders[1]), 1) == 1
        await pool.resume()
        assert paused(servers) == [False, False]
        assert told(servers, "/weight_info", "weight_version") == ["1", "1"]
    finally:
        await pool.close()
