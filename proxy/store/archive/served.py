"""The archive of a running server. Its methods work in threads, so that they never block turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from proxy.store.archive.access import ServedConnections
from proxy.store.archive.archive import Archive
from proxy.store.open_database import OpenDatabase
from tokengrove.errors import ArchiveUnavailable, ConfigurationError, StoreUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ServedArchive:
    """Deletes archived sessions. Use it on one event loop."""

    def __init__(self, opened: OpenDatabase) -> None:
        self._opened = opened
        self._archive: Archive | None = None

    async def delete(self, session_id: str) -> None:
        """Delete an archived session from its file and its row. Raises ArchiveUnavailable."""
        await self.run(lambda archive: archive.delete([session_id], refusing_keys=True))
        self._opened.metrics.deleted.by[()] += 1
        self._opened.changed.note(session_id)
        await self._opened.erase_log()

    async def recover(self) -> None:
        """Finish what a crash interrupted, such as the deletion of a file. A failure is logged."""
        try:
            await self.run(Archive.recover)
        except (ArchiveUnavailable, StoreUnavailable) as error:
            logger.warning("the archive was left as a crash left it: %(why)s", {"why": error.message})

    async def run(self, work: Callable[[Archive], T]) -> T:
        """Run a function with the archive in a thread, to its end. Raises ArchiveUnavailable."""
        if self._archive is None:
            self._archive = Archive(ServedConnections(self._opened, asyncio.get_running_loop()))
        try:
            return await asyncio.shield(asyncio.to_thread(work, self._archive))
        except ConfigurationError as error:
            raise ArchiveUnavailable(str(error)).showing("the archive cannot be used now") from None
