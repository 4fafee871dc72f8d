"""Administration of an engine: pauses, weights, memory and the prefix cache.

Operations run one at a time, under one lock. A pause closes the gate and then pauses the engine; its end resumes the
engine and then reopens the gate. An operation that needs a pause ends it only if no earlier pause was in force.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

from proxy.engine.gate import Load
from proxy.engine.interface import MEMORY_TAGS, Capability, EngineControl, PauseMode, WeightTransfer, tags_of
from proxy.engine.pause_state import PausedBy, PauseState
from proxy.telemetry.groups import EngineMetrics
from tokengrove.errors import EngineIncapable, EngineUnavailable, ProxyError

logger = logging.getLogger(__name__)


class GateControl(Protocol):
    """Control of a `Gate`, or of the gates of all processes that use the engine."""

    state: PauseState
    """The pause, as the gate of this process knows it."""

    async def hold(self, mode: PauseMode) -> None:
        """Stop admitting requests, and wait until the engine can be paused in `mode`."""

    async def let_in(self) -> None:
        """Admit requests again."""

    async def until_idle(self) -> None:
        """Wait until the engine runs no request."""

    async def load(self) -> Load:
        """The numbers of requests in the engine and of requests that wait to be admitted."""


class EngineAdmin:
    """A trainer's operations on the engine behind `gate`. Requests pass through `gate`, and not through this class."""

    def __init__(self, engine: EngineControl, gate: GateControl, metrics: EngineMetrics | None = None) -> None:
        self._engine, self._gate, self._state = engine, gate, gate.state
        self._metrics = metrics or EngineMetrics()
        self._lock = asyncio.Lock()

    async def load(self) -> Load:
        """The numbers of requests in the engine and of requests that wait to be admitted."""
        return await self._gate.load()

    async def take_over(self, released: frozenset[str]) -> None:
        """Take over the administration from another process: pause the engine like the gate, or end the pause.

        `released`: the kinds of memory that the other process released. Once all are resumed, the pause ends.
        """
        async with self._lock:
            self._state.release(released, begun=bool(released))
            if (mode := self._state.paused) is not None:
                await self._engine.pause(_engine_mode(mode))
            else:
                await self._engine.resume()
                await self._gate.let_in()

    async def go_on(self, mode: PauseMode, released: frozenset[str]) -> None:
        """Continue the pause of a server that ended after it had released memory (`released`)."""
        await self._gate.hold(mode)
        await self.take_over(released)

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling and admit no request. No effect if already paused. Raises the errors of the engine."""
        async with self._lock:
            await self._shut(mode)

    async def resume(self) -> None:
        """End the pause. Raises EngineUnavailable while memory is released."""
        async with self._lock:
            if self._state.released:
                raise EngineUnavailable("memory is released; POST /engine/resume_memory first")
            await self._reopen()

    async def update_weights(self, path: str, version: int | None, mode: PauseMode) -> int:
        """Load the weights in folder `path` during a pause in `mode`; return the new weight version.

        Raises InvalidRequest if the weights do not fit the model; the old weights then stay loaded.
        """
        async with self._lock:
            if self._state.paused is not None:
                return await self._load_weights(path, version)
            try:
                await self._shut(mode, PausedBy.UPDATE)
                try:
                    return await self._load_weights(path, version)
                finally:
                    await self._reopen()
            finally:
                self._state.by = PausedBy.TRAINER  # who ends the pause if the engine could not be resumed

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass one step of a weight transfer to the engine. The trainer must pause the engine around all steps."""
        async with self._lock:
            version = await self._engine.transfer_weights(step, fields)
            logger.info("weights transferred", {"step": step.value, "version": version})
            return version

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""
        async with self._lock:
            await self._engine.flush_cache()
            logger.info("prefix cache flushed")

    async def release_memory(self, tags: Sequence[str], mode: PauseMode) -> None:
        """Pause in `mode`, release the kinds of memory in `tags` (default: all), and stay paused.

        `mode` must be ABORT or DRAIN, since no request may run. Raises EngineUnavailable; EngineIncapable, before
        anything is paused, if the engine lacks the capability.
        """
        async with self._lock:
            self._check_can_release()
            kinds = frozenset(tags or MEMORY_TAGS) - self._state.released
            was_paused = self._state.paused is not None
            await self._empty(mode)
            try:
                if kinds:
                    await self._engine.release_memory(tags_of(kinds))
            except ProxyError:
                if not was_paused:
                    await self._reopen()
                raise
            self._state.release(kinds, begun=not was_paused)
            logger.info("engine memory released", {"released": ",".join(sorted(self._state.released))})

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Resume the kinds of memory in `tags` (default: all).

        Once all are resumed, the pause that `release_memory` began ends.
        """
        async with self._lock:
            self._check_can_release()
            kinds = frozenset(tags or MEMORY_TAGS) & self._state.released
            if kinds:
                await self._engine.resume_memory(tags_of(kinds))
            self._state.restore(kinds)
            logger.info("engine memory resumed", {"still_released": ",".join(sorted(self._state.released)) or None})
            if self._state.by is PausedBy.MEMORY and not self._state.released:
                await self._reopen()

    async def _shut(self, mode: PauseMode, by: PausedBy = PausedBy.TRAINER) -> None:
        """Pause in `mode`, unless already paused. On an error of the engine, reopen the gate and raise the error."""
        if self._state.paused is not None:
            return
        self._state.by = by
        await self._gate.hold(mode)
        self._state.since = time.monotonic()
        try:
            in_flight = (await self._gate.load()).in_flight
            await self._engine.pause(_engine_mode(mode))
        except BaseException as error:
            if isinstance(error, ProxyError):
                with suppress(ProxyError):  # the engine may have paused before it failed
                    await self._engine.resume()
            await self._gate.let_in()
            raise
        logger.info("engine paused", {"mode": mode.value, "in_flight": in_flight})

    async def _load_weights(self, path: str, version: int | None) -> int:
        before, began = self._engine.info().weight_version, time.monotonic()
        new = await self._engine.update_weights(path, version)
        fields = {"before": before, "version": new, "seconds": round(time.monotonic() - began, 3), "path": path}
        logger.info("weights updated", fields)
        return new

    async def _reopen(self) -> None:
        """End the pause, if one is in force."""
        if (mode := self._state.paused) is not None:
            waiting = (await self._gate.load()).waiting
            await self._engine.resume()
            await self._gate.let_in()
            paused_s = time.monotonic() - self._state.since
            self._metrics.pauses.observe(paused_s, mode)
            fields = {"mode": mode.value, "paused_s": round(paused_s, 3), "waiting": waiting}
            logger.info("engine resumed", fields)

    async def _empty(self, mode: PauseMode) -> None:
        """Pause with no request in the engine. Requests that an earlier pause left in the engine are finished first."""
        if self._state.paused is not None and (await self._gate.load()).in_flight:
            await self._reopen()
        await self._shut(mode)
        await self._gate.until_idle()

    def _check_can_release(self) -> None:
        info = self._engine.info()
        if Capability.RELEASE_MEMORY not in info.capabilities:
            raise EngineIncapable(
                f"this engine ({info.name}) cannot release memory; SGLang can, with enable_memory_saver"
            )


def _engine_mode(mode: PauseMode) -> PauseMode:
    """The mode that the engine is paused in: engines never see DRAIN."""
    return PauseMode.IN_PLACE if mode is PauseMode.DRAIN else mode
