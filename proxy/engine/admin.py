"""Administration of an engine: pauses, weights, memory and the prefix cache.

Operations run one at a time, under one lock. An operation that needs a pause shuts the gate for it, and reopens the
gate only if no earlier pause was in force.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.engine.gate import Gate
from proxy.engine.interface import MEMORY_TAGS, Capability, Engine, PauseMode, WeightTransfer
from proxy.errors import EngineIncapable, EngineUnavailable, ProxyError


class EngineAdmin:
    """A trainer's operations on the engine behind `gate`. Requests go through the gate itself."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine, self._gate = engine, gate
        self._lock = asyncio.Lock()
        self._released: frozenset[str] = frozenset()
        self._paused_for_memory = False

    @property
    def released(self) -> frozenset[str]:
        """The kinds of memory (of MEMORY_TAGS) that are released now."""
        return self._released

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling and admit no request; no effect if paused already. Raises what the engine raises."""
        async with self._lock:
            await self._gate.shut(mode)

    async def resume(self) -> None:
        """End the pause. Raises EngineUnavailable while memory is released."""
        async with self._lock:
            if self._released:
                raise EngineUnavailable("memory is released; POST /engine/resume_memory first")
            await self._reopen()

    async def update_weights(self, path: str, version: int | None, mode: PauseMode) -> int:
        """Load the weights in folder `path` during a pause by `mode`; return the new weight version.

        Raises InvalidRequest when the weights do not fit the model: the old ones then stay loaded.
        """
        async with self._lock:
            was_paused = self._gate.paused is not None
            await self._gate.shut(mode)
            try:
                return await self._engine.update_weights(path, version)
            finally:
                if not was_paused:
                    await self._reopen()

    async def transfer_weights(self, step: WeightTransfer, fields: Mapping[str, Any]) -> int:
        """Pass one step of a weight transfer to the engine, without a pause: the trainer pauses around all steps."""
        async with self._lock:
            return await self._engine.transfer_weights(step, fields)

    async def flush_cache(self) -> None:
        """Empty the prefix cache."""
        async with self._lock:
            await self._engine.flush_cache()

    async def release_memory(self, tags: Sequence[str], mode: PauseMode) -> None:
        """Pause by `mode` (ABORT or DRAIN, since nothing may run) and release memory: `tags`, or all. Stays paused.

        Raises EngineUnavailable; EngineIncapable, before anything is paused, if the engine lacks the capability.
        """
        async with self._lock:
            self._check_can_release()
            kinds = frozenset(tags or MEMORY_TAGS) - self._released
            was_paused = self._gate.paused is not None
            await self._empty(mode)
            try:
                if kinds:
                    await self._engine.release_memory(_tags(kinds))
            except ProxyError:
                if not was_paused:
                    await self._reopen()
                raise
            self._released |= kinds
            self._paused_for_memory = self._paused_for_memory or not was_paused

    async def resume_memory(self, tags: Sequence[str]) -> None:
        """Take memory back: `tags`, or all that is released. Once all is back, end the pause that releasing began."""
        async with self._lock:
            self._check_can_release()
            kinds = frozenset(tags or MEMORY_TAGS) & self._released
            if kinds:
                await self._engine.resume_memory(_tags(kinds))
            self._released -= kinds
            if self._paused_for_memory and not self._released:
                await self._reopen()

    async def _reopen(self) -> None:
        await self._gate.reopen()
        self._paused_for_memory = False

    async def _empty(self, mode: PauseMode) -> None:
        """Pause so that the engine holds no request; requests that an earlier pause left in it run on first."""
        if self._gate.paused is not None and self._gate.running:
            await self._reopen()
        await self._gate.shut(mode)
        await self._gate.until_idle()

    def _check_can_release(self) -> None:
        info = self._engine.info()
        if Capability.RELEASE_MEMORY not in info.capabilities:
            raise EngineIncapable(
                f"this engine ({info.name}) cannot release memory; SGLang can, with enable_memory_saver"
            )


def _tags(kinds: frozenset[str]) -> tuple[str, ...]:
    """`kinds` as engines expect them: an empty tuple for all of MEMORY_TAGS."""
    return () if kinds == frozenset(MEMORY_TAGS) else tuple(sorted(kinds))
