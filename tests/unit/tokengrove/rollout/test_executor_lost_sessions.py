"""Sessions of episodes whose worker is gone."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import says, serving
from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task
from tokengrove.rollout.executors import end_lost_session, results


async def test_a_session_that_starts_when_its_worker_has_died_already_is_ended_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request of the start was on its way to the server."""
    plan = EpisodePlan(Task("t", {}), 0, 0, Server("http://s"), AgentSpec("path", "a:b"), "late")
    async with serving(tmp_path, says()) as served, AsyncClient(app=served.app) as client:

        async def arrives(_: float) -> None:
            await client.start_session("t", session_id="late")

        monkeypatch.setattr(results, "AsyncClient", lambda *_: AsyncClient(app=served.app))
        monkeypatch.setattr(results, "asyncio", SimpleNamespace(sleep=arrives))
        await end_lost_session(plan, "worker", "the worker died")
        (listed,) = await client.sessions()
    assert (listed["session_id"], listed["status"], listed["outcome"]) == ("late", "ended", "Failed")
