"""The log of turns: when each began, how it ended, and whether its reply was written."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from proxy.side_columns.columns import NO_COLUMNS, Columns
from proxy.store.news import Seen
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import begun, writes
from proxy.store.sql.rows import RowValues
from proxy.store.writer import Phase
from proxy.types import ImageFile, Interaction

_NOTED_AFTER_S = 0.05
"""A crash loses the notes of this time. The end of a turn that is shorter takes its begin note along."""

_FORGOTTEN_AFTER_S = 0.5
"""The same for the note that a reply was written, in a database of one process: no other process waits for it."""


class TurnLog:
    """Commits of turns, and notes of their beginnings and replies, which nobody waits for.

    `absence`: whether the database is unavailable.
    """

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database
        self._write = database.write
        self.absence = database.absence
        self._write.take_along = self.queue_notes
        self._begun: dict[str, RowValues] = {}
        self._replied: list[str] = []
        self._replied_after_s = _NOTED_AFTER_S if database.shared else _FORGOTTEN_AFTER_S
        self._noting: asyncio.TimerHandle | None = None
        self._telling: asyncio.TimerHandle | None = None

    @property
    def refused(self) -> bool:
        """See OpenDatabase."""
        return self._database.refused

    @property
    def shared(self) -> bool:
        """True if other replicas may commit to the same sessions."""
        return self._database.shared

    async def append(
        self,
        interaction: Interaction,
        seen: Seen | None = None,
        files: Sequence[ImageFile] = (),
        columns: Columns = NO_COLUMNS,
    ) -> int | None:
        """Commit an interaction; set its seq and return it. Cancelling the caller does not prevent the commit.

        `files`: its images, except for the ones that its session certainly has. `columns`: its side columns.

        With `seen`, returns None and commits nothing if another replica changed the session since (optimistic
        locking). Raises SessionNotFound, and InvalidRequest for a known id or for unequal lengths of a complete node.
        """
        noted = self._begun.pop(interaction.id, None) is None
        change = writes.Append(interaction, seen, files, columns, noted, self._database.cut_off)
        size = 4 * len(interaction.prompt_suffix) + 8 * len(interaction.output_ids)
        if files:
            size += sum(len(file.data) for file in files)
        if columns:
            size += sum(column.rows.nbytes for column in columns.values())
        if self._replied:
            self._queue_replied()
        seq: int | None = await self._write.submit(writes.append_interactions, change, size=size)
        if seq is None:
            return None
        interaction.seq = seq
        if self._database.changed.watched:
            self._database.changed.note(interaction.session_id)
        return seq

    async def wait_for_commits(self, session_id: str) -> None:
        """Wait until every begun commit to a session is done or lost, including commits of broken connections.

        Raises SessionNotFound.
        """
        await self._write.submit(writes.wait_for_commits, {"of_sessions": [session_id]})

    async def supersede(self, interaction_id: str) -> None:
        """Mark a failed or aborted interaction as replaced by a retry, recorded or not."""
        self._begun.pop(interaction_id, None)
        await self._write.submit(writes.supersede, interaction_id)

    def note_begun(
        self, interaction_id: str, session_id: str, request_hash: str, idempotency_key: str | None = None
    ) -> None:
        """Note that a call began. The append of its interaction deletes the note.

        If this process dies first, an append of a complete interaction with the same request hash or key supersedes it.
        """
        self._begun[interaction_id] = begun.note_of(
            interaction_id, session_id, request_hash, idempotency_key, self._database.owner
        )
        if self._noting is None:
            self._noting = asyncio.get_running_loop().call_later(_NOTED_AFTER_S, self._queue_begun)
        if self._database.changed.watched:
            self._database.changed.note(session_id)

    def note_deleted(self, interaction_id: str) -> None:
        """Delete the note that a call began, because its session was deleted."""
        self._begun.pop(interaction_id, None)
        self._write.note(begun.delete_intents, interaction_id, Phase.LAST)

    def note_replied(self, interaction_id: str) -> None:
        """Note that the reply was completely written."""
        self._replied.append(interaction_id)
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_later(self._replied_after_s, self._queue_replied)

    def queue_notes(self) -> None:
        """Queue all notes. Call it before the writer stops."""
        self._queue_begun()
        self._queue_replied()

    def _queue_begun(self) -> None:
        if self._noting is not None:
            self._noting.cancel()
            self._noting = None
        notes, self._begun = self._begun, {}
        for note in notes.values():
            self._write.note(begun.insert_intents, note, Phase.FIRST)

    def _queue_replied(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._replied:
            names, self._replied = self._replied, []
            self._write.note(writes.set_replied, names, Phase.LAST)
