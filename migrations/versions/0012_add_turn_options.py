"""Keep what a session sets for its turns beside sampling defaults: who wins, the tool-call format, template options."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
oldest_server = "0009"


def upgrade() -> None:
    comment = "JSON of what holds for all turns: sampling_policy, tool_parser, ..."
    op.add_column("sessions", sa.Column("turn_options", sa.LargeBinary(), comment=comment))


def downgrade() -> None:
    op.drop_column("sessions", "turn_options")
