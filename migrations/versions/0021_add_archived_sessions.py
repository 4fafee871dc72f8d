"""Keep where archived sessions are: the file of each, and the files that are being written or deleted.

Servers from 0009 on run on: they do not know archived sessions, answer 404 for one, and let an agent begin a new
session of its name.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "archive_files",
        sa.Column("file", sa.Text(), primary_key=True, comment="its URL"),
        sa.Column("state", sa.Text(), nullable=False, comment="open, settled or doomed"),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.create_table(
        "archived_sessions",
        sa.Column("session_id", sa.Text(), primary_key=True),
        sa.Column("file", sa.Text(), nullable=False, comment="the file of archive_files that has it"),
        sa.Column("number", sa.Integer(), nullable=False, comment="as in sessions"),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("group_id", sa.Text()),
        sa.Column("ended_at", sa.Double(), nullable=False),
        sa.Column("turns", sa.Integer(), nullable=False, comment="interactions of any status"),
        sa.Column("archived_at", sa.Double(), nullable=False, comment="Unix seconds"),
    )
    op.create_index("ix_archived_sessions_file", "archived_sessions", ["file"])
    op.create_index("ix_archived_sessions_ended_at", "archived_sessions", ["ended_at"])


def downgrade() -> None:
    op.drop_table("archived_sessions")
    op.drop_table("archive_files")
