"""Counts the sessions that are active, wait to be claimed, or are leased, up to a limit that keeps the counts cheap.

A server whose trainers only export and never acknowledge has all its sessions in the queue.
"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import Connection, case, func, or_, select

from proxy.store.sql.tables import WAITING, sessions
from tokengrove.options.session import SessionStatus


class Backlog(NamedTuple):
    """Numbers of sessions, each at most the limit. `oldest_end`: the first end of waiting ones, in Unix seconds."""

    active: int
    waiting: int
    leased: int
    oldest_end: float | None


def count(connection: Connection, most: int, now: float) -> Backlog:
    """Count up to `most` active sessions, and up to `most` ended ones that are not acknowledged."""
    live = select(sessions.c.number).where(sessions.c.status == SessionStatus.ACTIVE).limit(most).subquery()
    ended = select(sessions.c.claimed_until).where(WAITING).limit(most).subquery()
    leases = func.coalesce(func.sum(case((ended.c.claimed_until > now, 1), else_=0)), 0)
    total, leased = connection.execute(select(func.count(), leases).select_from(ended)).one()
    free = or_(sessions.c.claimed_until.is_(None), sessions.c.claimed_until <= now)
    oldest = select(sessions.c.ended_at).where(WAITING, free).order_by(sessions.c.ended_order).limit(1)
    return Backlog(
        active=connection.execute(select(func.count()).select_from(live)).scalar_one(),
        waiting=total - leased,
        leased=leased,
        oldest_end=connection.execute(oldest).scalar(),
    )
