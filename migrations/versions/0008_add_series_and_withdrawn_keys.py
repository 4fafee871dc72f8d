"""Keep the keys that were replaced, and which sessions were opened one after the other under one name."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
oldest_server = "0008"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("series", sa.Text(), comment="the session that it continues: `default`, ..."))
    op.create_index(
        "ix_sessions_series",
        "sessions",
        ["series"],
        sqlite_where=sa.text("series IS NOT NULL"),
        postgresql_where=sa.text("series IS NOT NULL"),
    )
    op.create_table(
        "withdrawn_keys",
        sa.Column("key_hash", sa.Text(), primary_key=True),
        sa.Column("session_id", sa.Text(), primary_key=True, index=True),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("withdrawn_keys")
    op.drop_index("ix_sessions_series", "sessions")
    op.drop_column("sessions", "series")
