"""The routes of sessions: which named routes a session has turns of, by their kind when the turns ran.

A row is written with the first turn of a route, in its transaction. Rows of kind policy also hold the claims of trained
routes other than the server's own, whose claims are in `sessions` (`sql.claims`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    Text,
    bindparam,
    cast,
    delete,
    exists,
    insert,
    literal_column,
    select,
)

from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import session_routes, sessions
from proxy.types import Interaction
from tokengrove.options.model import RouteKind

# The session's row is locked, so no other transaction inserts the same row meanwhile.
_KEY: Mapping[str, BindParameter[str]] = {name: bindparam(f"of_{name}") for name in ("session_id", "route", "kind")}
_ONE: ColumnElement[int] = literal_column("1")
_KNOWN = select(_ONE).where(*(session_routes.c[name] == value for name, value in _KEY.items()))
_INSERT = Statement(
    insert(session_routes).from_select(
        list(_KEY), select(*(cast(value, Text) for value in _KEY.values())).where(~_KNOWN.exists())
    )
)


def note_routes(connection: Connection, nodes: Iterable[Interaction]) -> None:
    """Note the named routes of turns, whose sessions are locked."""
    found = dict.fromkeys((node.session_id, node.route, node.route_kind.value) for node in nodes if node.route)
    if found:
        _INSERT.run(
            connection, [{"of_session_id": name, "of_route": route, "of_kind": kind} for name, route, kind in found]
        )


def routes_of(connection: Connection, session_ids: Collection[str] | None) -> Mapping[str, frozenset[RouteKind]]:
    """The named routes of these sessions, of at most MAX_SESSION_IDS, or of all; each with the kinds that it had."""
    query = select(session_routes.c.route, session_routes.c.kind).distinct()
    if session_ids is not None:
        query = query.where(session_routes.c.session_id.in_(session_ids))
    found: dict[str, set[RouteKind]] = defaultdict(set)
    for route, kind in connection.execute(query):
        found[route].add(RouteKind(kind))
    return {route: frozenset(kinds) for route, kinds in sorted(found.items())}


def drop_stray_routes(connection: Connection, most: int) -> int:
    """Delete up to `most` rows of sessions that an older server deleted; return their number."""
    known = exists().where(sessions.c.session_id == session_routes.c.session_id)
    strays = list(connection.execute(select(session_routes.c.session_id).where(~known).limit(most)).scalars())
    if strays:
        connection.execute(delete(session_routes).where(session_routes.c.session_id.in_(strays)))
    return len(strays)
