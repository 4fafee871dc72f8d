"""Keep the logprobs of answers under a grammar before its mask."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
oldest_server = "0007"


def upgrade() -> None:
    comment = "float32, little-endian: without the mask of the grammar"
    op.add_column("interactions", sa.Column("unmasked_logprobs", sa.LargeBinary(), comment=comment))


def downgrade() -> None:
    op.drop_column("interactions", "unmasked_logprobs")
