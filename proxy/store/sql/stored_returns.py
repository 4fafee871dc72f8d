"""The stored returns of ended sessions: written in the transaction of the end, the reward or the late turn that changes
them, and computed there from the rows, so that they include whatever was committed before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, insert, select

from proxy.store.notes import step_fields
from proxy.store.sql import codec
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import interactions, returns, sessions
from proxy.trajectory.returns import compute_returns
from proxy.types import Lineage
from tokengrove.options.session import Credit, SessionStatus
from tokengrove.reasons import Status

_RULE = (sessions.c.session_id, sessions.c.discount, sessions.c.credit)
_TURN = tuple(interactions.c[name] for name in ("id", "parent_id", "reward", "purpose", "notes"))
_TURNS = Statement(
    select(*_RULE, *_TURN)
    .join(interactions, interactions.c.session_id == sessions.c.session_id)
    .where(Named(sessions.c.session_id), sessions.c.status != bindparam("live"))
    .where(interactions.c.status == bindparam("complete"))
    .order_by(sessions.c.session_id, interactions.c.seq)
)
_INSERT = Statement(insert(returns))
_DELETE = Statement(
    delete(returns).where(
        Named(returns.c.interaction_id),
        returns.c.discount == bindparam("of_discount"),
        returns.c.credit == bindparam("of_credit"),
    )
)


@dataclass(frozen=True, slots=True)
class _Turn:
    id: str
    parent_id: str | None
    reward: float | None
    purpose: str | None
    route: str
    lineage: Lineage | None = None
    status: Status = Status.COMPLETE


def store_returns(connection: Connection, session_ids: Collection[str]) -> None:
    """Compute and store the returns of the ended ones of these sessions, which are locked, by each one's own rule."""
    asked = {"names": json_list(session_ids), "live": SessionStatus.ACTIVE.value, "complete": Status.COMPLETE.value}
    found: dict[tuple[str, float, str], list[_Turn]] = defaultdict(list)
    for name, discount, credit, *turn in _TURNS.fetch(connection, asked):
        found[name, discount, credit].append(_turn_of(*turn))
    for (_, discount, credit), turns in found.items():
        values = compute_returns(turns, discount, Credit(credit))
        # Delete and insert, because the two databases differ in the syntax of an upsert.
        _DELETE.run(connection, [{"names": json_list(values), "of_discount": discount, "of_credit": credit}])
        rule = {"discount": discount, "credit": credit}
        _INSERT.run(connection, [{"interaction_id": turn, **rule, "value": value} for turn, value in values.items()])


def _turn_of(name: str, parent_id: str | None, reward: float | None, purpose: str | None, notes: Any) -> _Turn:
    fields = step_fields(codec.decode_json(notes, {}))
    return _Turn(name, parent_id, reward, purpose, fields["route"], fields.get("lineage"))
