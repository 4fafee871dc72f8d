"""Keep what a begun call asked and which server runs it, and a checksum of what never changes of a row.

Servers from 0009 on run on: their begun calls are not superseded by a request after a crash, and their rows have no
checksum.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
oldest_server = "0009"


def upgrade() -> None:
    op.add_column("intents", sa.Column("request_hash", sa.Text()))
    op.add_column("intents", sa.Column("idempotency_key", sa.Text()))
    op.add_column(
        "intents", sa.Column("owner", sa.Text(), comment="the process that runs it, NULL once that has ended")
    )
    comment = "an equal later request was answered by another process"
    op.add_column("intents", sa.Column("answered", sa.Boolean(), comment=comment))
    comment = "XXH3-128 of the columns that never change"
    op.add_column("interactions", sa.Column("checksum", sa.LargeBinary(), comment=comment))
    for name, when in (("checksum", "start"), ("end_checksum", "end")):
        comment = f"XXH3-128 of the columns that its {when} sets for good"
        op.add_column("sessions", sa.Column(name, sa.LargeBinary(), comment=comment))


def downgrade() -> None:
    op.drop_column("sessions", "end_checksum")
    op.drop_column("sessions", "checksum")
    op.drop_column("interactions", "checksum")
    for name in ("answered", "owner", "idempotency_key", "request_hash"):
        op.drop_column("intents", name)
