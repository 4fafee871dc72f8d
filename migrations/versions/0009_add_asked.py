"""Keep what a request asked of its reply, so that the reply can be written again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
oldest_server = "0009"


def upgrade() -> None:
    comment = "what the request asked of its reply, without defaults"
    op.add_column("interactions", sa.Column("asked", sa.LargeBinary(), comment=comment))


def downgrade() -> None:
    op.drop_column("interactions", "asked")
