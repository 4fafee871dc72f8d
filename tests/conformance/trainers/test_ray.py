"""Episodes on a real Ray cluster of two nodes: the contract of executors, killed workers and a node that is removed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.conformance.packages import package
from tests.e2e.processes import server_process
from tests.executor_contract import KEY, PLACES, ExecutorContract, outcome, plan, until
from tokengrove.client import AsyncClient
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult
from tokengrove.rollout.executors import Executor, ExecutorOptions, RayOptions, executor_for
from tokengrove.rollout.executors.ray_cluster import check_reachable

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of two CPUs each, which this program has not joined."""
    ray = package("ray")
    cluster = package("ray.cluster_utils").Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    cluster.wait_for_nodes()
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ["--engine", "scripted", "--engine-arg", "tokens=8", "--admin-key", KEY]
    with server_process(tmp_path_factory.mktemp("ray"), *flags) as process:
        yield process.url.rstrip("/")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, KEY) as client:
        yield client


@pytest.fixture(scope="module")
def options(cluster: Any) -> ExecutorOptions:
    return ExecutorOptions("ray", PLACES, ray=RayOptions(cluster.address, 0.1, 3))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def executor(options: ExecutorOptions, url: str) -> AsyncIterator[Executor]:
    async with executor_for(options, url) as executor:
        yield executor


@pytest.mark.asyncio(loop_scope="module")
class TestOnRay(ExecutorContract):
    """As on one machine."""


async def process_of(each: EpisodePlan) -> int:
    told = Path(each.task.data["told"])
    await until(told.exists)
    return int(await asyncio.to_thread(told.read_text))


async def played_with_retries(executor: Executor, url: str, first: EpisodePlan) -> list[EpisodeResult]:
    """Play it again in new sessions for as long as its worker dies, as a run does."""
    results = [await executor.play(first)]
    while results[-1].failure == "worker":
        again = plan(url, task=dict(first.task.data), options=first.options, discard=first.discard)
        results.append(await executor.play(again))
    return results


def group_plans(url: str, folder: Path, group: str, count: int) -> list[EpisodePlan]:
    """Plans of one group that wait for the file `go`."""
    tasks = [{"wait": str(folder / "go"), "told": str(folder / f"{number}.told")} for number in range(count)]
    options = {"group_id": group, "group_size": count}
    return [plan(url, task=task, options=options, discard=frozenset({"worker"})) for task in tasks]


async def check_export(client: AsyncClient, group: str, results: list[list[EpisodeResult]]) -> None:
    """Each episode is there once: as the attempt that was played to its end."""
    export = await client.export(filter={"group_id": group})
    assert len(export.samples) == len(results)
    assert set(export.sessions) == {attempts[-1].session_id for attempts in results}


@pytest.mark.asyncio(loop_scope="module")
async def test_episodes_of_a_killed_worker_are_repeated_and_exported_once(
    executor: Executor, client: AsyncClient, url: str, tmp_path: Path
) -> None:
    plans = group_plans(url, tmp_path, "killed", PLACES)
    playing = [asyncio.create_task(played_with_retries(executor, url, each)) for each in plans]
    processes = [await process_of(each) for each in plans]
    assert sorted(map(processes.count, set(processes))) == [3, 3]
    os.kill(processes[0], signal.SIGKILL)
    (tmp_path / "go").touch()
    results = await asyncio.gather(*playing)
    killed = [attempts for attempts in results if len(attempts) > 1]
    assert 1 <= len(killed) <= 3
    assert all("ActorDiedError" in (attempts[0].message or "") for attempts in killed)
    assert {attempts[-1].failure for attempts in results} == {None}
    await check_export(client, "killed", results)


@pytest.mark.asyncio(loop_scope="module")
async def test_episodes_of_a_removed_node_are_repeated_on_another_and_exported_once(
    executor: Executor, client: AsyncClient, url: str, tmp_path: Path, cluster: Any
) -> None:
    plans = group_plans(url, tmp_path, "removed", PLACES)
    one_for_each_node = ExecutorOptions("ray", PLACES, ray=RayOptions(num_cpus=1.5, episodes_per_worker=3))
    async with executor_for(one_for_each_node, url) as executor:
        playing = [asyncio.create_task(played_with_retries(executor, url, each)) for each in plans]
        processes = [await process_of(each) for each in plans]
        assert sorted(map(processes.count, set(processes))) == [3, 3]
        await asyncio.to_thread(cluster.remove_node, cluster.worker_nodes.copy().pop())
        (tmp_path / "go").touch()
        results = await asyncio.gather(*playing)
    assert sorted(len(attempts) for attempts in results) == [1, 1, 1, 2, 2, 2]
    assert {attempts[-1].failure for attempts in results} == {None}
    await check_export(client, "removed", results)
    cluster.add_node(num_cpus=2)


@pytest.mark.asyncio(loop_scope="module")
async def test_a_worker_whose_event_loop_is_blocked_is_killed(
    cluster: Any, client: AsyncClient, url: str, tmp_path: Path
) -> None:
    from tokengrove.rollout.executors.places import Shape
    from tokengrove.rollout.executors.pooled import PooledExecutor
    from tokengrove.rollout.executors.ray_host import RayHost

    shape = Shape(1, 2, spread=False, look_s=0.1, patience=5)
    async with PooledExecutor(2, lambda: RayHost(2, {"num_cpus": 0}), shape) as executor:
        blocked = plan(url, task={"then": "block"})
        result = await executor.play(blocked)
        assert result.failure == "worker"
        assert "did not answer for 0.5 s" in (result.message or "")
        assert (await outcome(client, blocked))[:2] == ("ended", "Failed")

    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.asyncio(loop_scope="module")
async def test_what_the_drivers_script_defines_is_sent_to_the_workers(
    executor: Executor, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    source = (
        "class Scale:\n    value = 21.0\n"
        "async def agent(task, session, http_client, scale):\n"
        "    body = {'messages': [{'role': 'user', 'content': 'Hello'}]}\n"
        "    (await http_client.post(f'{session.base_url}/chat/completions', json=body)).raise_for_status()\n"
        "    return scale.value\n"
        "def reward(agent_reward):\n    return 2 * agent_reward\n"
    )
    defined: dict[str, Any] = {"__name__": "__main__"}
    exec(source, defined)
    for name in ("Scale", "agent", "reward"):
        monkeypatch.setattr(__main__, name, defined[name], raising=False)
    spec = AgentSpec("path", "__main__:agent", arguments={"scale": defined["Scale"]()})
    sent = plan(url, reward="__main__:reward")
    sent = EpisodePlan(**{**{name: getattr(sent, name) for name in sent.__slots__}, "agent": spec})
    result = await executor.play(sent)
    assert (result.failure, result.message, result.reward) == (None, None, 42.0)


def test_an_address_of_this_machine_is_refused_where_the_cluster_has_others() -> None:
    nodes = [
        {"Alive": True, "NodeManagerAddress": "10.0.0.1"},
        {"Alive": True, "NodeManagerAddress": "10.0.0.2"},
        {"Alive": False, "NodeManagerAddress": "10.0.0.3"},
    ]
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0"):
        with pytest.raises(ConfigurationError, match=r"others \(10.0.0.2\): start the server with --host 0.0.0.0"):
            check_reachable(f"http://{host}:8080", nodes, "10.0.0.1")
        check_reachable(f"http://{host}:8080", nodes[:1] + nodes[2:], "10.0.0.1")
    check_reachable("http://10.0.0.1:8080", nodes, "10.0.0.1")
    check_reachable("http://rollouts.example.org", nodes, "10.0.0.1")


def test_without_a_cluster_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = package("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in (None, "127.0.0.1:9"):

        def refuse(**options: Any) -> None:
            raise ConnectionError("nobody there")

        monkeypatch.setattr(ray, "init", refuse)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        with pytest.raises(ConfigurationError, match="--ray-address"):
            executor_for(ExecutorOptions("ray", ray=RayOptions(address)))
