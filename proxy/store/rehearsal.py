"""Runs the statements of a turn once before the first turn, because compiling them takes as long as a whole turn.

They run in a transaction that is rolled back, on a session with a unique name.
"""

from __future__ import annotations

import uuid
from array import array

from sqlalchemy import Engine

from proxy.store.news import Seen
from proxy.store.sql import begun, reads, revisions, rows, writes
from proxy.store.sql.commit_marks import CommitMarks
from proxy.store.sql.starts import Start
from proxy.types import Api, Interaction, Message, Role, SamplingParams, SessionRecord, ids_of
from tokengrove.reasons import FinishReason, Reason, Status


def rehearse_turn(writer_engine: Engine, reader_engine: Engine) -> None:
    """Run the statements that store and find a turn. Blocks. Raises SQLAlchemyError if the database refuses."""
    name = f"rehearsal-{uuid.uuid4().hex}"
    turn = Interaction(
        id=name,
        session_id=name,
        parent_id=None,
        aligned=False,
        reason=Reason.FIRST,
        api=Api.CHAT,
        status=Status.COMPLETE,
        new_messages=(Message(Role.USER, "x"),),
        output=Message(Role.ASSISTANT, "x"),
        prefix_length=0,
        prompt_suffix=ids_of([0]),
        output_ids=ids_of([0]),
        logprobs=array("f", [0.0]),
        versions=((1, 0),),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(),
    )
    with writer_engine.connect() as connection, connection.begin() as transaction:
        writes.create_freely(connection, [Start(rows.session_row(SessionRecord(name)))])
        begun.insert_intents(connection, [begun.note_of(name, name, "", None, name)])
        writes.append_interactions(connection, [writes.Append(turn)])
        writes.set_replied(connection, [[name]])
        if connection.dialect.name != "sqlite":
            CommitMarks().put(connection)
        transaction.rollback()
    with reader_engine.begin() as connection:
        revisions.load_new_turns(connection, [(name, Seen(0, 0))])
        reads.ping(connection)
