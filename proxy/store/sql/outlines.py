"""Queries for people who view sessions: requests and answers without tokens, and counts of sessions.

They run only while sessions are viewed. No turn waits for them or writes data for them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, RowMapping, Select, case, exists, func, not_, null, select

from proxy.store.session_query import SessionQuery
from proxy.store.sql import rows
from proxy.store.sql.begun import PENDING
from proxy.store.sql.reads import filtered
from proxy.store.sql.tables import intents, interactions, sessions
from proxy.types import GroupSummary, Outline
from tokengrove.options.model import RouteKind
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

# Purposes are derived from the prompts of roots that do not state theirs. Nothing else reads messages.
_DERIVED = interactions.c.parent_id.is_(None)
_COUNTED = ("prompt_tokens", "output_tokens", "versions")
_STEPS = select(
    *(interactions.c[name] for name in (*rows.STEP_COLUMNS, *_COUNTED)),
    *(
        case((_DERIVED, column), else_=null()).label(str(column.key))
        for column in (interactions.c.new_messages, interactions.c.tools)
    ),
)


def load_outlines(connection: Connection, session_ids: Collection[str]) -> dict[str, Outline]:
    """The outlines of at most MAX_SESSION_IDS sessions by id. A session without turns has an empty outline."""
    found: dict[str, list[RowMapping]] = {name: [] for name in session_ids}
    query = _STEPS.where(interactions.c.session_id.in_(session_ids))
    for row in connection.execute(query.order_by(interactions.c.session_id, interactions.c.seq)).mappings():
        found[row["session_id"]].append(row)
    return {name: _outline(steps) for name, steps in found.items()}


def _outline(steps: list[RowMapping]) -> Outline:
    complete = [row for row in steps if row["status"] == Status.COMPLETE.value]
    found = [rows.step_of(row) for row in steps]
    trained = [row for row, step in zip(steps, found, strict=True) if step.route_kind is RouteKind.POLICY]
    versions = {
        version
        for row in trained
        if row["status"] == Status.COMPLETE.value
        for _, version in rows.pairs_of(row["versions"])
    }
    return Outline(
        steps=found,
        prompt_tokens=sum(row["prompt_tokens"] for row in complete),
        output_tokens=sum(row["output_tokens"] for row in complete),
        versions=(min(versions), max(versions)) if versions else None,
    )


def count_begun(connection: Connection, session_ids: Collection[str]) -> dict[str, int]:
    """The number of calls that have begun and not ended, by session; zeros are omitted."""
    query = select(intents.c.session_id, func.count()).where(intents.c.session_id.in_(session_ids), PENDING)
    return {name: count for name, count in connection.execute(query.group_by(intents.c.session_id))}


def count_by_status(connection: Connection, wanted: SessionQuery) -> dict[SessionStatus, int]:
    """The number of wanted sessions of each status, on all pages. Conditions on values are ignored."""
    query = filtered(select(sessions.c.status, func.count()), wanted).group_by(sessions.c.status)
    return {SessionStatus(status): count for status, count in connection.execute(query)}


def find_groups(connection: Connection, wanted: SessionQuery, before: int | None, limit: int) -> list[GroupSummary]:
    """At most `limit` groups with their wanted sessions, ordered by their first session, newest first.

    `before`: the `number` of the last group of the previous page. Conditions on values are ignored. The sessions are
    read from the newest on until there are enough groups, whatever their number.
    """
    earlier = sessions.alias("earlier")
    before_it = select(earlier.c.number).where(
        earlier.c.group_id == sessions.c.group_id, earlier.c.number < sessions.c.number
    )
    first = filtered(select(sessions.c.group_id, sessions.c.number), wanted).where(
        sessions.c.group_id.is_not(None), not_(exists(filtered(before_it, wanted, earlier)))
    )
    if before is not None:
        first = first.where(sessions.c.number < before)
    page = {name: number for name, number in connection.execute(first.order_by(sessions.c.number.desc()).limit(limit))}
    parts: dict[str, list[RowMapping]] = defaultdict(list)
    for row in connection.execute(_parts(wanted, page)).mappings():
        parts[row["group_id"]].append(row)
    return [_group(name, number, parts[name]) for name, number in page.items()]


def _parts(wanted: SessionQuery, group_ids: Collection[str]) -> Select[Any]:
    """The sessions of groups, counted by group and status."""
    columns = sessions.c
    counted = (
        func.count().label("count"),
        func.max(columns.group_size).label("size"),
        func.min(columns.created_at).label("created_at"),
        func.max(columns.updated_at).label("last_at"),
    )
    query = filtered(select(columns.group_id, columns.status, *counted), wanted)
    return query.where(columns.group_id.in_(group_ids)).group_by(columns.group_id, columns.status)


def _group(name: str, number: int, parts: list[RowMapping]) -> GroupSummary:
    sizes = [part["size"] for part in parts if part["size"] is not None]
    return GroupSummary(
        group_id=name,
        number=number,
        size=max(sizes, default=None),
        by_status={SessionStatus(part["status"]): part["count"] for part in parts},
        created_at=min(part["created_at"] for part in parts),
        last_at=max(part["last_at"] for part in parts),
    )
