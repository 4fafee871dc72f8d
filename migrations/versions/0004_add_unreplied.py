"""Note replies that are not written out in a table of their own, and index only the values that sessions have."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
oldest_server = "0004"

_SPARSE = ("group_id", "api_key_hash", "control_key_hash", "claimed_by")


def upgrade() -> None:
    op.create_table(
        "unreplied",
        sa.Column("interaction_id", sa.Text(), nullable=False),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("interaction_id", name="pk_unreplied"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_unreplied_session_id", "unreplied", ["session_id"])
    op.execute(
        "INSERT INTO unreplied (interaction_id, session_id) "
        "SELECT id, session_id FROM interactions WHERE status = 'complete' AND replied_at IS NULL"
    )
    op.drop_column("interactions", "replied_at")
    for name in _SPARSE:
        present = sa.text(f"{name} IS NOT NULL")
        op.drop_index(f"ix_sessions_{name}", table_name="sessions")
        op.create_index(f"ix_sessions_{name}", "sessions", [name], sqlite_where=present, postgresql_where=present)


def downgrade() -> None:
    for name in _SPARSE:
        op.drop_index(f"ix_sessions_{name}", table_name="sessions")
        op.create_index(f"ix_sessions_{name}", "sessions", [name])
    op.add_column(
        "interactions", sa.Column("replied_at", sa.Double(), comment="when the end of the reply was written out")
    )
    op.execute(
        "UPDATE interactions SET replied_at = coalesce(completed_at, created_at) "
        "WHERE status = 'complete' AND id NOT IN (SELECT interaction_id FROM unreplied)"
    )
    op.drop_table("unreplied")
