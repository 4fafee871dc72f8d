"""A rehearsed turn leaves nothing behind, and compiles the statements that the first turn runs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
from sqlalchemy import select

from proxy.store.news import Seen
from proxy.store.sql import begun, commit_marks, revisions, writes
from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import interactions, sessions
from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord


async def test_the_first_turn_after_a_rehearsal_compiles_nothing(
    store: Store, node: Callable[..., Interaction], monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in chain.from_iterable(vars(module).values() for module in (begun, commit_marks, revisions, writes)):
        if isinstance(value, Statement):
            monkeypatch.setattr(value, "_compiled", {})
    store.database.rehearse()
    for table in (sessions, interactions):
        rows = await store.database.read(lambda connection, of: connection.execute(select(of)).all(), table)
        assert rows == []

    def refuse(*_: Any) -> None:
        raise AssertionError("a statement was compiled by a turn")

    monkeypatch.setattr(Statement, "_compile", refuse)
    await store.starts.create_session(SessionRecord("task-0"))
    store.turns.note_begun("chatcmpl-1", "task-0", "h")
    assert await store.turns.append(node()) == 0
    assert await store.database.shared_reads.new_turns("task-0", Seen(1, 0)) is not None
    store.turns.note_replied("chatcmpl-1")
