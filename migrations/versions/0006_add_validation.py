"""Mark validation sessions, which claims and exports leave out unless asked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from proxy.store.sql.codec import decode_json

revision = "0006"
down_revision = "0005"
oldest_server = "0006"

_PAGE = 1000


def upgrade() -> None:
    about = "its metadata says validate: true"
    column: sa.Column[bool] = sa.Column(
        "validation", sa.Boolean(), nullable=False, server_default=sa.false(), comment=about
    )
    op.add_column("sessions", column)
    sessions = sa.table("sessions", sa.column("number"), sa.column("metadata"), sa.column("validation"))
    connection, last = op.get_bind(), -1
    described = sa.select(sessions.c.number, sessions.c.metadata).where(sessions.c.metadata.is_not(None))
    while page := connection.execute(
        described.where(sessions.c.number > last).order_by(sessions.c.number).limit(_PAGE)
    ).all():
        last = page[-1].number
        marked = [number for number, metadata in page if decode_json(metadata).get("validate") is True]
        connection.execute(sessions.update().where(sessions.c.number.in_(marked)).values(validation=True))


def downgrade() -> None:
    op.drop_column("sessions", "validation")
