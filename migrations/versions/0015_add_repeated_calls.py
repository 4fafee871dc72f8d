"""Keep what commits are found by whose answer was lost, and the answers of control calls for those who repeat them.

Servers from 0009 on run on: they neither write nor read these tables.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0013"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "commit_marks",
        sa.Column("writer", sa.Text(), primary_key=True, comment="a random name for each process that writes"),
        sa.Column("number", sa.BigInteger(), nullable=False, comment="of its last transaction that left a mark"),
        sa.Column("marked_at", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "answers",
        sa.Column("call_hash", sa.Text(), primary_key=True, comment="of the Idempotency-Key and the caller's key"),
        sa.Column("request_hash", sa.Text(), nullable=False, comment="of the method, the path and the body"),
        sa.Column("answer", sa.LargeBinary(), nullable=False, comment="sealed with the Idempotency-Key"),
        sa.Column("answered_at", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_answers_answered_at", "answers", ["answered_at"])


def downgrade() -> None:
    op.drop_table("answers")
    op.drop_table("commit_marks")
