"""Note which engine servers are paused, so that the next start continues those of a server that has crashed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "engine_pauses",
        sa.Column("url", sa.Text(), primary_key=True),
        sa.Column("owner", sa.Text(), primary_key=True, comment="the server that paused it: HOST:PORT"),
        sa.Column("mode", sa.Text(), nullable=False),
        sa.Column("released", sa.Text(), nullable=False, comment="kinds of memory, with commas"),
        sa.Column("until", sa.Double(), nullable=False, comment="a lease, Unix seconds"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    op.drop_table("engine_pauses")
