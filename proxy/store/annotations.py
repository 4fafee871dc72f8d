"""What trainers told of the tokens that they trained."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from proxy.store.open_database import OpenDatabase
from proxy.store.sql import annotated
from proxy.trajectory.mismatch import Part
from proxy.trajectory.told import Output, Told

_BYTES = 4


class Annotations:
    """Adds what trainers tell, and reads it."""

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database

    async def add(self, told: Told) -> list[list[Part] | None]:
        """Store what a trainer told; return, for each turn, its parts, or None if nothing of it is new.

        Raises NotFound, SessionNotFound and AnnotatedOtherwise; then nothing is stored.
        """
        if not told.turns:
            return []
        size = sum(output.tokens * len(streams) * _BYTES for output, streams, _ in told.turns)
        found: list[list[Part] | None] = await self._database.write.submit(annotated.annotate, told, size=size)
        return found

    async def load_outputs(self, interaction_ids: Collection[str]) -> dict[str, Output]:
        """The outputs of complete interactions, by id. Unknown ids are ignored."""
        return await self._database.read(annotated.load_outputs, interaction_ids)

    async def steps(self, trainer: str | None, before: int | None, most: int) -> list[dict[str, Any]]:
        """The newest steps with their sums."""
        return await self._database.read(annotated.steps, trainer, before, most)

    async def samplers(self, trainer: str | None, first: int | None, last: int | None) -> list[dict[str, Any]]:
        """The sums of steps [first, last] by trainer, server, weight version, dtype and quantisation."""
        return await self._database.read(annotated.samplers, trainer, first, last)

    async def of_step(self, trainer: str, step: int, after: str | None, most: int) -> list[dict[str, Any]]:
        """What a trainer told in a step, by interaction id from that after `after` on, of at most `most` turns."""
        return await self._database.read(annotated.parts_of_step, trainer, step, after, most)
