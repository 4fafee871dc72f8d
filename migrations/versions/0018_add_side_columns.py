"""Keep rows beside the tokens of turns: kept sets, routed experts, alternatives.

Servers from 0009 on run on: they record none. If one deletes a session that has some, `db prune` deletes these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "side_columns",
        sa.Column("interaction_id", sa.Text(), primary_key=True),
        sa.Column("name", sa.Text(), primary_key=True, comment="routed_experts, kept, ..."),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column("start", sa.Integer(), nullable=False, comment="position of the token of the first row"),
        sa.Column("number", sa.Integer(), nullable=False, comment="of rows"),
        sa.Column("dtype", sa.Text(), nullable=False, comment="of the values, or of the ids of sets"),
        sa.Column("shape", sa.Text(), nullable=False, comment="of a row: sizes with commas"),
        sa.Column("checksum", sa.LargeBinary(), nullable=False, comment="XXH3-128 of the other columns"),
        sa.Column("data", sa.LargeBinary(), nullable=False, comment="the rows, little-endian"),
    )
    op.create_index("ix_side_columns_session_id", "side_columns", ["session_id"])


def downgrade() -> None:
    op.drop_table("side_columns")
