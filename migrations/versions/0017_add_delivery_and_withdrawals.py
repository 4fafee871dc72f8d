"""Keep who delivers a session to trainers, as its start said, and when it was withdrawn.

Servers from 0009 on run on: both leave the queue by `acknowledged_at`, which these heed. They count withdrawn sessions,
and those of runners, as members of groups, and export withdrawn ones; a session of a runner that one of them ends is
skipped by the claims of newer servers only.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
oldest_server = "0009"


def upgrade() -> None:
    comment = "`runner` if whoever runs it exports it, NULL if claims deliver it"
    op.add_column("sessions", sa.Column("delivery", sa.Text(), comment=comment))
    comment = "when it left its group, claims and exports, Unix seconds"
    op.add_column("sessions", sa.Column("withdrawn_at", sa.Double(), comment=comment))


def downgrade() -> None:
    op.drop_column("sessions", "withdrawn_at")
    op.drop_column("sessions", "delivery")
