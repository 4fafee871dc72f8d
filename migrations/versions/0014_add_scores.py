"""Keep whose rewards score a session, as its start said, and the score that its end gave for the whole of it."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
oldest_server = "0009"


def upgrade() -> None:
    comment = "whose rewards count, as its start said: session, path or agent"
    op.add_column("sessions", sa.Column("reward_scope", sa.Text(), comment=comment))
    op.add_column("sessions", sa.Column("score", sa.Double(), comment="of the whole session, as its end gave it"))


def downgrade() -> None:
    op.drop_column("sessions", "score")
    op.drop_column("sessions", "reward_scope")
