"""Add key expiry, taken capacity, export time and a revision for replicas to sessions; add the capacity table."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
oldest_server = "0002"


def upgrade() -> None:
    op.add_column("sessions", sa.Column("keys_expire_at", sa.Double()))
    op.add_column("sessions", sa.Column("took_capacity", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("sessions", sa.Column("exported_at", sa.Double(), comment="when it was last exported after its end"))
    op.add_column(
        "sessions",
        sa.Column(
            "revision",
            sa.Integer(),
            nullable=False,
            server_default="0",
            comment="grows with every change but new turns",
        ),
    )
    op.create_table(
        "capacity",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("available", sa.BigInteger(), nullable=False, comment="starts that were granted and not taken"),
        sa.PrimaryKeyConstraint("name", name="pk_capacity"),
    )


def downgrade() -> None:
    op.drop_table("capacity")
    for name in ("revision", "exported_at", "took_capacity", "keys_expire_at"):
        op.drop_column("sessions", name)
