"""The stored answers to control calls, for clients that repeat a call."""

from __future__ import annotations

from proxy.store.answer import Answer
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import answers


class Answers:
    """Looks up answers, which are written with the changes of their calls."""

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database

    async def find(self, call_hash: str) -> Answer | None:
        """The answer to a call of the last day; None if there was no such call."""
        return await self._database.read(answers.find, call_hash)
