"""Keep a full-text index of messages, and how much of each session it has.

Servers from 0009 on run on: they index nothing, and leave words of sessions that they delete to the next server that
indexes (`sql.texts.strays`).
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "0024"
down_revision = "0023"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "indexed_sessions",
        sa.Column("session_id", sa.Text(), primary_key=True),
        sa.Column("number", sa.Integer(), nullable=False, comment="as in sessions, when it was indexed"),
        sa.Column("turns", sa.Integer(), nullable=False, comment="interactions below this seq are in the index"),
    )
    op.create_index("ix_indexed_sessions_number", "indexed_sessions", ["number"])
    if op.get_context().dialect.name == "sqlite":
        # Without the texts, which are those of the interactions.
        op.execute(
            "CREATE VIRTUAL TABLE turn_words USING fts5(text, content='', tokenize='unicode61 remove_diacritics 0')"
        )
        return
    op.create_table(
        "turn_words",
        sa.Column("session_id", sa.Text(), primary_key=True),
        sa.Column("seq", sa.Integer(), primary_key=True),
        sa.Column("part", sa.Integer(), primary_key=True, comment="of a text that is too long for one tsvector"),
        sa.Column("words", postgresql.TSVECTOR(), nullable=False),
    )
    op.create_index("ix_turn_words_words", "turn_words", ["words"], postgresql_using="gin")


def downgrade() -> None:
    op.drop_table("turn_words")
    op.drop_table("indexed_sessions")
