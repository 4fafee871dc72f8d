"""Keep events until the receivers of webhooks have them: an outbox, written with the change that each event tells of.

Servers from 0009 on run on: they tell of nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "webhook_deliveries",
        sa.Column("id", sa.Text(), primary_key=True, comment="of the event, the same for all receivers"),
        sa.Column("url", sa.Text(), primary_key=True),
        sa.Column("event", sa.Text(), nullable=False, comment="session.ended, ..."),
        sa.Column("body", sa.Text(), nullable=False, comment="JSON, as it is sent"),
        sa.Column("created_at", sa.Double(), nullable=False, comment="Unix seconds"),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("due_at", sa.Double(), comment="of the next attempt, NULL for a dead letter"),
        sa.Column("error", sa.Text(), comment="of the last attempt"),
    )
    op.create_index("ix_webhook_deliveries_url", "webhook_deliveries", ["url", "due_at"])


def downgrade() -> None:
    op.drop_table("webhook_deliveries")
