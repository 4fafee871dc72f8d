"""A commit whose answer was lost is found again, whatever was deleted meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from proxy.store import database
from proxy.store.sql.commit_marks import CommitMarks
from proxy.store.sql.deletions import Deletion, delete_sessions
from proxy.store.sql.rows import session_row
from proxy.store.sql.starts import Start, grant
from proxy.store.sql.writes import Append, BatchWrite, append_interactions, create_freely
from proxy.store.writer import Change, Phase
from proxy.types import Interaction, SessionRecord
from tests.wide import CROSSED


@CROSSED
@pytest.mark.parametrize("committed", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("changes", [("kept", "deleted"), ("deleted", "kept"), ("grant", "deleted")])
def test_what_was_done_is_found_though_a_session_of_it_was_deleted(
    postgres_url: str, node: Callable[..., Interaction], changes: Sequence[str], committed: bool
) -> None:
    engine, marks = database.writer_engine(database.parse_url(postgres_url)), CommitMarks()
    with engine.begin() as connection:
        starts = [Start(session_row(SessionRecord(name, task_id="task"))) for name in ("kept", "deleted")]
        create_freely(connection, starts)
    with engine.connect() as connection, connection.begin() as transaction:
        outcomes = []
        for name in changes:
            turn = Append(node(f"turn of {name}", session_id=name))
            written: tuple[BatchWrite, Any] = (grant, 3) if name == "grant" else (append_interactions, turn)
            write, payload = written
            change = Change(write, payload, Phase.ORDERED, None, urgent=True)
            outcomes.append((change, write(connection, [payload])[0]))
        marks.leave(connection, outcomes)
        if not committed:
            transaction.rollback()
    with engine.begin() as connection:
        delete_sessions(connection, [Deletion("deleted")])
    with engine.begin() as connection:
        assert marks.was_done(connection, outcomes) is committed
    engine.dispose()
