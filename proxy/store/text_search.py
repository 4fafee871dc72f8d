"""Searches for text in the turns of sessions, and how complete the index is that they read."""

from __future__ import annotations

from collections.abc import Collection

from proxy.store.inspection import Inspection
from proxy.store.recordings import Readable
from proxy.store.session_query import SessionQuery
from proxy.store.sql import texts
from proxy.store.text_query import Match, TextQuery
from tokengrove.errors import InvalidRequest

_MATCHES = 3


class TextSearch:
    """Reads the index. `on`: it is kept up to date, or was once.

    `scanned`: `TextIndexer` found every session up to this number indexed, apart from those in use.
    """

    def __init__(self, database: Readable, *, on: bool) -> None:
        self._database, self.on = database, on
        self.scanned = -1

    @classmethod
    def of_stored(cls, inspection: Inspection) -> TextSearch:
        """A search in what servers of a database have indexed."""
        return cls(inspection, on=inspection.read_now(texts.is_used))

    def check(self, wanted: SessionQuery) -> None:
        """Raise InvalidRequest if a query wants a text, but no texts are indexed."""
        if wanted.text is not None and not self.on:
            raise InvalidRequest(
                "'filter.text' needs a server with --search (TOKENGROVE_SEARCH=1), which indexes the texts of turns; "
                "'filter.search' finds ids",
                param="filter.text",
            )

    async def count_unindexed(self) -> int:
        """The number of sessions with turns that a search does not find yet."""
        return await self._database.read(texts.count_unindexed, self.scanned)

    async def matches(self, session_ids: Collection[str], wanted: TextQuery) -> dict[str, list[Match]]:
        """The first three turns that have the text, of each of these sessions. Raises InvalidRequest after 5 s."""
        return await self._database.read(texts.bounded, texts.find_matches, session_ids, wanted, _MATCHES)
