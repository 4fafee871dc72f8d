"""Episodes on hosts: in other processes or on other machines. When a host dies, only its own episodes fail."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Self

from tokengrove.client.exit_reason import exit_reason
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors.host import Host, HostDied
from tokengrove.rollout.executors.places import Places, Shape
from tokengrove.rollout.executors.playing import Playing
from tokengrove.rollout.executors.results import end_lost_session, failed
from tokengrove.rollout.script import stop_import

logger = logging.getLogger(__name__)


class PooledExecutor:
    """Plays at most `concurrency` episodes at once, on hosts that `make` creates."""

    def __init__(self, concurrency: int, make: Callable[[], Host], shape: Shape) -> None:
        self._playing = Playing(concurrency)
        self._places = Places(make, shape)

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        stop_import()
        return await self._playing.result(plan, self._play(plan))

    async def close(self) -> None:
        await self._playing.end()
        await self._places.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _play(self, plan: EpisodePlan) -> EpisodeResult:
        try:
            seat = await self._places.take(plan)
        except HostDied as died:
            return failed(plan, "worker", f"no worker could be started: {died}")
        began = time.monotonic()
        try:
            return await seat.host.play(plan)
        except HostDied as died:
            self._places.lost(seat)
            reason = f"the worker {died}"
            await end_lost_session(plan, "worker", reason)
            return failed(plan, "worker", reason, time.monotonic() - began)
        except Exception as error:  # such as an answer of another version of this package
            logger.exception("the answer of a worker for session %s cannot be read", plan.session_id)
            reason = f"the answer of the worker cannot be read: {exit_reason(error)}"
            await end_lost_session(plan, "worker", reason)
            return failed(plan, "worker", reason, time.monotonic() - began)
        finally:
            self._places.give_back(seat)
