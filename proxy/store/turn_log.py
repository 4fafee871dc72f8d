"""The log of turns: when each began, how it ended, and whether its reply was written."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.side_columns.columns import NO_COLUMNS, Columns
from proxy.store.news import Seen
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import begun, writes
from proxy.store.writer import Phase
from proxy.types import ImageFile, Interaction


class TurnLog:
    """Commits of turns. The notes are queued without waiting; a crash may lose the notes of the last 50 ms.

    `absence`: whether the database is unavailable.
    """

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database
        self._write = database.write
        self.absence = database.absence

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
        change = writes.Append(interaction, seen, files, columns)
        size = 4 * len(interaction.prompt_suffix) + 8 * len(interaction.output_ids)
        if files:
            size += sum(len(file.data) for file in files)
        if columns:
            size += sum(column.rows.nbytes for column in columns.values())
        seq: int | None = await self._write.submit(writes.append_interactions, change, size=size)
        if seq is not None:
            interaction.seq = seq
            self._database.changed.note(interaction.session_id)
        return seq

    async def wait_for_commits(self, session_id: str) -> None:
        """Wait until every begun commit to a session is done or lost, including commits of broken connections.

        Raises SessionNotFound.
        """
        await self._write.submit(writes.wait_for_commits, {"of_sessions": [session_id]})

    async def supersede(self, interaction_id: str) -> None:
        """Mark a failed or aborted interaction as replaced by a retry, recorded or not."""
        await self._write.submit(writes.supersede, interaction_id)

    def note_begun(
        self, interaction_id: str, session_id: str, request_hash: str, idempotency_key: str | None = None
    ) -> None:
        """Note that a call began. The append of its interaction deletes the note.

        If this process dies first, an append of a complete interaction with the same request hash or key supersedes it.
        """
        note = begun.note_of(interaction_id, session_id, request_hash, idempotency_key, self._database.owner)
        self._write.note(begun.insert_intents, note, Phase.FIRST)
        self._database.changed.note(session_id)

    def note_deleted(self, interaction_id: str) -> None:
        """Delete the note that a call began, because its session was deleted."""
        self._write.note(begun.delete_intents, interaction_id, Phase.LAST)

    def note_replied(self, interaction_id: str) -> None:
        """Note that the reply was completely written."""
        self._write.note(writes.set_replied, interaction_id, Phase.LAST)
