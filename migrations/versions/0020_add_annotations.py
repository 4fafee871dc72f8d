"""Keep what trainers told of the tokens that they trained, by step.

The streams themselves are rows of `side_columns`. Servers from 0009 on run on: they write no rows. If one deletes a
session that has rows, `db prune` deletes these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "annotations",
        sa.Column("interaction_id", sa.Text(), primary_key=True),
        sa.Column("trainer", sa.Text(), primary_key=True),
        sa.Column("step", sa.BigInteger(), primary_key=True),
        sa.Column("first", sa.Integer(), primary_key=True, comment="index of the first of its tokens in the output"),
        sa.Column("session_id", sa.Text(), nullable=False),
        sa.Column(
            "server", sa.Text(), nullable=False, comment="the engine server that sampled, empty for one in the process"
        ),
        sa.Column("dtype", sa.Text(), nullable=False),
        sa.Column("quantization", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False, comment="weight version of the tokens"),
        sa.Column("tokens", sa.Integer(), nullable=False, comment="those with a stream"),
        sa.Column("masked", sa.Integer(), nullable=False),
        sa.Column("clipped", sa.Integer(), nullable=False),
        sa.Column("compared", sa.Integer(), nullable=False, comment="tokens with the logprobs of both"),
        sa.Column("kl", sa.Double(), nullable=False, comment="summed over them"),
        sa.Column("log_ratio", sa.Double(), nullable=False, comment="the largest of them"),
        sa.Column("noted_at", sa.Double(), nullable=False, comment="Unix seconds"),
    )
    op.create_index("ix_annotations_trainer", "annotations", ["trainer", "step"])
    op.create_index("ix_annotations_session_id", "annotations", ["session_id"])


def downgrade() -> None:
    op.drop_table("annotations")
