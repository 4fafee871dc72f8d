"""Counts the sessions that are active, wait to be claimed, or are leased, up to a limit that keeps the counts cheap.

A server whose trainers only export and never acknowledge has all its sessions in the queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, case, func, or_, select

from proxy.store.sql.tables import WAITING, archived_sessions, session_routes, sessions
from tokengrove.options.model import RouteKind
from tokengrove.options.session import SessionStatus


class Backlog(NamedTuple):
    """Numbers of sessions, each at most the limit. `oldest_end`: the first end of waiting ones, in Unix seconds.

    `archived`: sessions that were moved to an archive, which no other number includes.
    """

    active: int
    waiting: int
    leased: int
    oldest_end: float | None
    archived: int = 0


class RouteBacklog(NamedTuple):
    """Numbers of ended sessions in the queue of one route, each at most the limit."""

    waiting: int
    leased: int


def count_routes(connection: Connection, routes: Sequence[str], most: int, now: float) -> Mapping[str, RouteBacklog]:
    """Count up to `most` ended sessions of each of these trained routes that are not acknowledged for it."""
    return {route: _count_route(connection, route, most, now) for route in routes}


def _count_route(connection: Connection, route: str, most: int, now: float) -> RouteBacklog:
    columns = session_routes.c
    query = select(columns.claimed_until).join(sessions, sessions.c.session_id == columns.session_id)
    queued = (columns.acknowledged_at.is_(None), columns.kind == RouteKind.POLICY.value, columns.route == route)
    ended = query.where(*queued, sessions.c.ended_order.is_not(None)).limit(most).subquery()
    leases = func.coalesce(func.sum(case((ended.c.claimed_until > now, 1), else_=0)), 0)
    total, leased = connection.execute(select(func.count(), leases).select_from(ended)).one()
    return RouteBacklog(total - leased, leased)


def count(connection: Connection, most: int, now: float) -> Backlog:
    """Count up to `most` active sessions, and up to `most` ended ones that are not acknowledged."""
    live = select(sessions.c.number).where(sessions.c.status == SessionStatus.ACTIVE).limit(most).subquery()
    ended = select(sessions.c.claimed_until).where(WAITING).limit(most).subquery()
    leases = func.coalesce(func.sum(case((ended.c.claimed_until > now, 1), else_=0)), 0)
    total, leased = connection.execute(select(func.count(), leases).select_from(ended)).one()
    free = or_(sessions.c.claimed_until.is_(None), sessions.c.claimed_until <= now)
    moved = select(archived_sessions.c.number).limit(most).subquery()
    oldest = select(sessions.c.ended_at).where(WAITING, free).order_by(sessions.c.ended_order).limit(1)
    return Backlog(
        active=connection.execute(select(func.count()).select_from(live)).scalar_one(),
        waiting=total - leased,
        leased=leased,
        oldest_end=connection.execute(oldest).scalar(),
        archived=connection.execute(select(func.count()).select_from(moved)).scalar_one(),
    )
