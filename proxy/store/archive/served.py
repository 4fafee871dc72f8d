"""The archive of a running server. Its methods work in threads, so that they never block turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from sqlalchemy import ColumnElement
from sqlalchemy.exc import SQLAlchemyError

from proxy.store.archive.access import ServedConnections, first_of
from proxy.store.archive.archive import Archive
from proxy.store.archive.scratch import Scratch
from proxy.store.faults import reason_of
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import archived
from tokengrove.errors import ArchiveUnavailable, ConfigurationError, ScratchFull, StoreUnavailable

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ServedArchive:
    """Adds sessions, deletes archived ones, and copies them for exports. Use it on one event loop."""

    def __init__(self, opened: OpenDatabase) -> None:
        self._opened = opened
        self._archive: Archive | None = None
        self._running: set[asyncio.Future[Any]] = set()

    async def delete(self, session_id: str) -> None:
        """Delete an archived session from its file and its row. Raises ArchiveUnavailable."""
        await self.run(lambda archive: archive.delete([session_id], refusing_keys=True))
        self._opened.metrics.deleted.by[()] += 1
        self._opened.changed.note(session_id)
        await self._opened.erase_log()

    async def add(self, folder: str, names: Collection[str], still: ColumnElement[bool]) -> list[str]:
        """Archive those of these sessions that meet a condition; return their ids. Raises ArchiveUnavailable."""
        added = await self.run(lambda archive: archive.add(folder, names, still))
        self._opened.metrics.removed.by[("archived",)] += added.sessions
        for name, why in added.broken.items():
            logger.error("session %(id)s cannot be read, so it is not archived: %(why)s", {"id": name, "why": why})
        for name in added.names:
            self._opened.changed.note(name)
        return added.names

    @asynccontextmanager
    async def sweeping(self) -> AsyncIterator[bool]:
        """Hold the place of the one server that sweeps old sessions. Yields False if another one holds it."""
        place = first_of(self._opened)
        alone = await self._in_thread(place.__enter__)
        try:
            yield alone
        finally:
            await self._in_thread(place.__exit__, None, None, None)

    async def scratch(self, session_ids: Collection[str]) -> Scratch:
        """A copy of these sessions, archived or not, which the caller closes.

        Raises ArchiveUnavailable, and ScratchFull if the temporary folder has no room.
        """

        def work(archive: Archive) -> Scratch:
            scratch = Scratch()
            try:
                with scratch.filling() as add:
                    archive.copy(session_ids, add)
            except BaseException:
                scratch.close()
                raise
            return scratch

        try:
            return await self.run(work)
        except SQLAlchemyError as error:
            raise ScratchFull(
                f"archived sessions cannot be copied to the temporary folder ({reason_of(error)}): free space there"
            ) from None

    async def needs_recovery(self) -> bool:
        """Whether a crash has interrupted something, such as the deletion of a file. Raises StoreUnavailable."""
        return bool(await self._opened.read(archived.unsettled))

    async def recover(self) -> None:
        """Finish what a crash interrupted. A failure is logged."""
        try:
            await self.run(Archive.recover)
        except (ArchiveUnavailable, StoreUnavailable) as error:
            logger.warning("the archive was left as a crash left it: %(why)s", {"why": error.message})

    async def run(self, work: Callable[[Archive], T]) -> T:
        """Run a function with the archive in a thread, to its end. Raises ArchiveUnavailable."""
        if self._archive is None:
            self._archive = Archive(ServedConnections(self._opened, asyncio.get_running_loop()))
        try:
            return await self._in_thread(work, self._archive)
        except ConfigurationError as error:
            raise ArchiveUnavailable(str(error)).showing("the archive cannot be used now") from None

    async def close(self) -> None:
        """Wait until no thread uses the database, which closes next."""
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread, to its end even if the caller is cancelled."""
        running = asyncio.ensure_future(asyncio.to_thread(function, *arguments))
        self._running.add(running)
        running.add_done_callback(self._running.discard)
        return await asyncio.shield(running)
