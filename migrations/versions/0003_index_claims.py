"""Add two indexes for claims: ended sessions that are not acknowledged, and the sessions of a claim."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
oldest_server = "0003"

_WAITING = sa.text("acknowledged_at IS NULL AND ended_order IS NOT NULL")


def upgrade() -> None:
    op.create_index(
        "ix_sessions_waiting", "sessions", ["ended_order"], sqlite_where=_WAITING, postgresql_where=_WAITING
    )
    op.create_index("ix_sessions_claimed_by", "sessions", ["claimed_by"])


def downgrade() -> None:
    op.drop_index("ix_sessions_claimed_by", table_name="sessions")
    op.drop_index("ix_sessions_waiting", table_name="sessions")
