"""Say which servers run on a database, so that those of two releases may run side by side."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
oldest_server = "0009"


def upgrade() -> None:
    comment = "the oldest revision of servers that run on this database"
    op.create_table("compatibility", sa.Column("oldest_server", sa.Text(), primary_key=True, comment=comment))


def downgrade() -> None:
    op.drop_table("compatibility")
