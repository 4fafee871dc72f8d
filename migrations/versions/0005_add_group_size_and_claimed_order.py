"""Add what claims by whole groups need: the size of a session's group, and the last end when it was claimed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
oldest_server = "0005"


def upgrade() -> None:
    op.add_column(
        "sessions", sa.Column("group_size", sa.Integer(), comment="sessions that its group needs to be claimed")
    )
    op.add_column(
        "sessions", sa.Column("claimed_order", sa.BigInteger(), comment="the last ended_order when it was claimed")
    )


def downgrade() -> None:
    op.drop_column("sessions", "claimed_order")
    op.drop_column("sessions", "group_size")
