"""Keep the images of conversations: their bytes once a database, and which sessions have them.

Servers from 0009 on run on: they take no images. If one deletes a session that has some, `db prune` deletes these.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
oldest_server = "0009"


def upgrade() -> None:
    op.create_table(
        "images",
        sa.Column("digest", sa.Text(), primary_key=True, comment="SHA-256 of the data, in hex"),
        sa.Column("media_type", sa.Text(), nullable=False),
        sa.Column("width", sa.Integer(), nullable=False, comment="in pixels, as it is decoded"),
        sa.Column("height", sa.Integer(), nullable=False),
        sa.Column("pixels", sa.Text(), nullable=False, comment="a digest of the decoded pixels, if known"),
        sa.Column("size", sa.Integer(), nullable=False, comment="bytes of data"),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False, comment="as the client sent it"),
    )
    op.create_table(
        "session_images",
        sa.Column("session_id", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), sa.ForeignKey("images.digest"), primary_key=True),
        sa.Column("url", sa.Text(), comment="where the server fetched it"),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_session_images_digest", "session_images", ["digest"])
    comment = "JSON: the images of prompt_suffix, each with the place of its tokens in the whole prompt"
    op.add_column("interactions", sa.Column("images", sa.LargeBinary(), comment=comment))


def downgrade() -> None:
    op.drop_column("interactions", "images")
    op.drop_table("session_images")
    op.drop_table("images")
