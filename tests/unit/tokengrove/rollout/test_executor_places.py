"""Places on hosts: an episode that waits gets one, or learns why there is none."""

from __future__ import annotations

import asyncio

import pytest

from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task
from tokengrove.rollout.executors import pooled
from tokengrove.rollout.executors.host import Host, HostDied
from tokengrove.rollout.executors.places import Places, Shape
from tokengrove.rollout.executors.playing import Playing
from tokengrove.rollout.executors.results import failed

PLAN = EpisodePlan(Task("t", {}), 0, 0, Server("http://127.0.0.1:9"), AgentSpec("path", "a:b"), "session-of-a-plan")


class _Strange(Host):
    """Answers what this version does not know."""

    async def start(self, plan: EpisodePlan) -> None: ...

    async def ping(self) -> int:
        return 0

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        return EpisodeResult(**{"of_another": "version"})  # type: ignore[arg-type]

    async def close(self) -> None: ...


async def test_an_answer_that_cannot_be_read_is_the_failure_of_its_episode_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []

    async def end(plan: EpisodePlan, failure: str, reason: str) -> None:
        ended.append(plan.session_id)

    monkeypatch.setattr(pooled, "end_lost_session", end)
    async with pooled.PooledExecutor(1, _Strange, Shape(hosts=1, places=1)) as executor:
        result = await executor.play(PLAN)
    assert result.failure == "worker" and "'of_another'" in str(result.message)
    assert ended == [PLAN.session_id]


class _Unstartable(Host):
    """Fails as a machine without a free file descriptor does."""

    def __init__(self) -> None:
        self.killed = False

    async def start(self, plan: EpisodePlan) -> None:
        raise OSError(24, "Too many open files")

    async def kill(self, reason: str) -> None:
        self.killed = True


async def test_a_host_that_cannot_be_started_for_whatever_reason_lets_nobody_wait() -> None:
    hosts: list[_Unstartable] = []

    def make() -> Host:
        hosts.append(_Unstartable())
        return hosts[-1]

    places = Places(make, Shape(hosts=1, places=1))
    with pytest.raises(HostDied, match="Too many open files"):
        await places.take(PLAN)
    assert [host.killed for host in hosts] == [True]
    await places.close()


async def test_a_caller_that_is_cancelled_while_the_executor_closes_is_told_of_it() -> None:
    playing, begun = Playing(1), asyncio.Event()

    async def step() -> EpisodeResult:
        begun.set()
        await asyncio.Event().wait()
        return failed(PLAN, "agent", "never")

    caller = asyncio.ensure_future(playing.result(PLAN, step()))
    await begun.wait()
    ending = asyncio.ensure_future(playing.end())
    await asyncio.sleep(0)
    caller.cancel()
    await ending
    with pytest.raises(asyncio.CancelledError):
        await caller
