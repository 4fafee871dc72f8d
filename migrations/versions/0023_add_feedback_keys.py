"""Keep the key of a session that may reward turns and nothing else.

Servers from 0009 on run on: they refuse such a key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
oldest_server = "0009"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("feedback_key_hash", sa.Text()))
    op.create_index(
        "ix_sessions_feedback_key_hash",
        "sessions",
        ["feedback_key_hash"],
        sqlite_where=sa.text("feedback_key_hash IS NOT NULL"),
        postgresql_where=sa.text("feedback_key_hash IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("ix_sessions_feedback_key_hash", "sessions")
    op.drop_column("sessions", "feedback_key_hash")
