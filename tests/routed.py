"""Sessions with turns of several routes, written to a database without the engines that would answer them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction, routed
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Reason

POLICY: dict[str, Any] = {"policy": {}}
ONE_TRAINED = json.dumps(
    {
        **POLICY,
        "opponent": {"kind": "frozen", "engine": "scripted"},
        "judge": {"kind": "external", "url": "http://judge.invalid/v1"},
    }
)
"""A table with one trained route, an opponent and a judge."""
TWO_TRAINED = json.dumps({**json.loads(ONE_TRAINED), "rival": {"engine": "scripted"}})
"""The same, with a second trained route."""


def turns_of(session_id: str, *routes: str) -> list[Interaction]:
    """One turn after the other, each of a route ("" for none), with ids such as `s.0`. All are roots."""
    made = []
    for at, route in enumerate(routes):
        node = interaction(f"{session_id}-{at}", suffix=(at + 1,), output=(20 + at, 40 + at), seq=at, version=at)
        node.reason = Reason.NEW_ROOT if at else Reason.FIRST
        node.session_id, node.created_at, node.completed_at = session_id, float(at + 1), at + 1.5
        made.append(routed(node, route) if route else node)
    return made


async def record(url: str, name: str, *routes: str, ended: bool = True, **fields: Any) -> list[Interaction]:
    """Write a session with one turn of each route, and end it."""
    store = Store.open(url, migrate=True)
    try:
        session = SessionRecord(name, "t", created_at=1.0, updated_at=1.0, **fields)
        await store.starts.create_session(session)
        nodes = turns_of(name, *routes)
        for node in nodes:
            await store.turns.append(node)
        if ended:
            done = replace(session, status=SessionStatus.ENDED, ended_at=100.0)
            assert await store.changes.end_session(done)
        return nodes
    finally:
        await store.close()
