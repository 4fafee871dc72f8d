"""A worker of a Ray cluster, as seen from the driver: an actor that plays several episodes at once.

Ray restarts nothing: an actor that dies gives a failure, and the run retries the episode in a new session.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tokengrove.client.exit_reason import exit_reason
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors.host import HostDied
from tokengrove.rollout.executors.process_host import START_S
from tokengrove.rollout.executors.ray_worker import Episodes
from tokengrove.rollout.executors.results import end_lost_session, failed

logger = logging.getLogger(__name__)
_CANCEL_S, _CLOSE_S, _WAITS_S = 30.0, 10.0, 30.0
_BESIDE = 8
"""Concurrent calls of an actor in addition to its episodes: pings, the preparation and the end."""


class RayHost:
    """One actor. `resources`: Ray's options for it, such as `num_cpus` and `runtime_env`."""

    def __init__(self, places: int, resources: Mapping[str, Any], start_s: float = START_S) -> None:
        self._places, self._resources, self._start_s = places, resources, start_s
        self._actor: Any = None
        self._died: str | None = None

    async def start(self, plan: EpisodePlan) -> None:
        import ray

        try:
            self._actor = (
                ray.remote(Episodes)
                .options(max_concurrency=self._places + _BESIDE, max_restarts=0, max_task_retries=0, **self._resources)
                .remote()
            )
            await self._scheduled()
            await self._prepared(plan)
        except asyncio.CancelledError:
            await self.kill("was no longer needed")
            raise

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        try:
            sent = _sent(plan)
        except Exception as error:  # cloudpickle may raise any exception
            return failed(plan, "agent", f"the episode cannot be sent to a Ray worker: {exit_reason(error)}")
        call = self._called("play", *sent)
        answer = asyncio.ensure_future(self._answer(call))
        try:
            told = await asyncio.shield(answer)
        except asyncio.CancelledError:
            await to_the_end(self._cancel(plan, call, answer))
            raise
        if isinstance(told, str):
            await end_lost_session(plan, "agent", told)
            return failed(plan, "agent", f"the Ray worker cannot play the episode: {told}")
        return EpisodeResult(**told)

    async def ping(self) -> int:
        told = await self._answer(self._called("ping"))
        return told if isinstance(told, int) else 0

    async def kill(self, reason: str) -> None:
        import ray

        self._died = self._died or reason
        if self._actor is not None:
            with suppress(Exception):  # it is gone, or the cluster is
                ray.kill(self._actor)

    async def close(self) -> None:
        with suppress(HostDied, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._answer(self._called("close"))
        await self.kill("was closed")

    async def _scheduled(self) -> None:
        """Wait until the cluster has room for the actor and the actor runs."""
        running = asyncio.ensure_future(self._answer(self._called("ping")))
        try:
            while not (await asyncio.wait([running], timeout=_WAITS_S))[0]:
                cpus = self._resources.get("num_cpus")
                logger.warning("a Ray worker waits for room in the cluster (--ray-cpus %s)", cpus)
        finally:
            running.cancel()
        running.result()

    async def _prepared(self, plan: EpisodePlan) -> None:
        """Create the agent in the actor. Exceptions there are ignored, because each episode reports them. Raises
        HostDied.
        """
        try:
            sent = _sent(plan)
        except Exception:
            return
        try:
            async with asyncio.timeout(self._start_s):
                await self._answer(self._called("prepare", *sent))
        except TimeoutError:
            await self.kill(f"had not imported its agent within {self._start_s:g} s and was killed")
            raise HostDied(str(self._died)) from None

    def _called(self, verb: str, *given: Any) -> Any:
        """Call a method of the actor; return the reference to its result. Raises HostDied."""
        if self._died is not None:
            raise HostDied(self._died)
        try:
            return getattr(self._actor, verb).remote(*given)
        except Exception as error:  # the cluster is gone
            raise HostDied(f"cannot be reached: {_told(error)}") from None

    async def _answer(self, call: Any) -> Any:
        """The result of a call, or the text of its exception. Raises HostDied if the actor is gone."""
        from ray.exceptions import RayTaskError, TaskCancelledError

        try:
            return await call
        except TaskCancelledError:
            return "it was cancelled"
        except RayTaskError as error:
            return exit_reason(error.cause)
        except Exception as error:
            reason = self._died or f"died: {_told(error)}"
            await self.kill(reason)
            raise HostDied(reason) from None

    async def _cancel(self, plan: EpisodePlan, call: Any, answer: asyncio.Future[Any]) -> None:
        """Cancel an episode in the actor, which ends its session. If it does not, end the session from here."""
        import ray

        ended = False
        with suppress(Exception):
            ray.cancel(call)
            async with asyncio.timeout(_CANCEL_S):
                await answer
                ended = True
        if not ended:
            await end_lost_session(plan, "cancelled", "cancelled")


def _sent(plan: EpisodePlan) -> tuple[EpisodePlan, bytes, bytes | None]:
    """A plan, the key of its agent, and the pickled definitions of the driver's script that the plan names, if any."""
    from ray import cloudpickle

    main = vars(sys.modules["__main__"])
    named = [plan.agent.target, plan.reward or "", *plan.scorers]
    paths = [name.replace(":", ".").split(".") for name in named]
    tops = {path[1] for path in paths if path[0] == "__main__"}
    defined = {name: main[name] for name in sorted(tops) if name in main}
    key = hashlib.blake2b(cloudpickle.dumps(plan.agent)).digest()
    return plan, key, cloudpickle.dumps(defined) if defined else None


def _told(error: Exception) -> str:
    """The first four lines of Ray's explanation, in one line after the type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join([type(error).__name__ + ":", *lines[:4]])
