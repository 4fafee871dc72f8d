"""Keep the key of a session that may reward turns and nothing else.

Servers from 0009 on run on: they refuse such a key.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
oldest_server = "0009"

_INDEX = "ix_sessions_feedback_key_hash"
_PRESENT = sa.text("feedback_key_hash IS NOT NULL")


def upgrade() -> None:
    op.add_column("sessions", sa.Column("feedback_key_hash", sa.Text()))
    with op.get_context().autocommit_block():
        op.drop_index(_INDEX, "sessions", if_exists=True, postgresql_concurrently=True)  # of a build that broke off
        op.create_index(
            _INDEX,
            "sessions",
            ["feedback_key_hash"],
            sqlite_where=_PRESENT,
            postgresql_where=_PRESENT,
            postgresql_concurrently=True,
        )


def downgrade() -> None:
    op.drop_index(_INDEX, "sessions")
    op.drop_column("sessions", "feedback_key_hash")
