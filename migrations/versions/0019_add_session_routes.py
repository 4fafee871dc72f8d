"""Keep the routes of each session, and the claims of trained routes other than the server's own.

Servers from 0009 on run on: they serve no named routes, so they write no rows. The claims of the server's own route
stay in `sessions`, where they find them. If one deletes a session that has rows, `db prune` deletes these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "session_routes",
        sa.Column("session_id", sa.Text(), primary_key=True),
        sa.Column("route", sa.Text(), primary_key=True, comment="a name in the table of models"),
        sa.Column("kind", sa.Text(), primary_key=True, comment="policy, frozen or external, when its turns ran"),
        sa.Column("claimed_by", sa.Text()),
        sa.Column("claimed_until", sa.Double()),
        sa.Column("claimed_order", sa.BigInteger(), comment="as in sessions"),
        sa.Column("acknowledged_at", sa.Double()),
    )
    queued = sa.text("acknowledged_at IS NULL AND kind = 'policy'")
    op.create_index(
        "ix_session_routes_queued", "session_routes", ["route"], sqlite_where=queued, postgresql_where=queued
    )
    claimed = sa.text("claimed_by IS NOT NULL")
    op.create_index(
        "ix_session_routes_claimed_by", "session_routes", ["claimed_by"], sqlite_where=claimed, postgresql_where=claimed
    )


def downgrade() -> None:
    op.drop_table("session_routes")
