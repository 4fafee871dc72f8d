"""The notes about engine servers that servers on this database have paused."""

from __future__ import annotations

from collections.abc import Collection

from proxy.store.open_database import OpenDatabase
from proxy.store.sql import engine_pauses
from proxy.types import PauseNote


class EnginePauses:
    """Stores `PauseNote`s, each by its server and its owner."""

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database

    @property
    def shared(self) -> bool:
        """True if other servers may have notes in the database."""
        return self._database.shared

    async def note(self, notes: Collection[PauseNote]) -> None:
        """Write notes, and replace notes with the same server and owner."""
        await self._database.write.submit(engine_pauses.note, notes)

    async def forget(self, notes: Collection[PauseNote]) -> None:
        """Delete notes, unless they were renewed since they were read."""
        await self._database.write.submit(engine_pauses.forget, notes)

    async def noted(self) -> list[PauseNote]:
        """All notes."""
        return await self._database.read(engine_pauses.noted)
