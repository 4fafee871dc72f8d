"""The audit of sessions with turns of several routes, and what prune deletes of them."""

from __future__ import annotations

import asyncio

from proxy.commands.audit import audit
from proxy.store.inspection import inspecting
from proxy.store.pruning import prune
from tests.databases import execute
from tests.routed import record


def findings(url: str) -> list[str]:
    with inspecting(url) as inspection:
        return [finding.what for finding in audit(inspection).findings]


async def test_a_session_of_several_routes_has_no_fault(database_url: str) -> None:
    await record(database_url, "s", "policy", "opponent", "judge", "rival", "")
    assert findings(database_url) == []


async def test_a_parent_of_another_route_is_a_fault(database_url: str) -> None:
    await record(database_url, "s", "policy", "opponent")
    execute(database_url, "UPDATE interactions SET parent_id = 's-0' WHERE id = 's-1'")
    assert any(
        "its parent s-0 is of route 'policy', not of its own, 'opponent'" in what for what in findings(database_url)
    )


async def test_routes_that_an_older_server_left_behind_are_pruned(database_url: str) -> None:
    await record(database_url, "s", "policy", "rival")
    await record(database_url, "kept", "policy")
    execute(database_url, "UPDATE session_routes SET session_id = 'gone' WHERE session_id = 's'")
    assert "the routes of session gone belong to no session: prune" in findings(database_url)
    await asyncio.to_thread(prune, database_url, 1e9, dry_run=False)
    assert execute(database_url, "SELECT session_id FROM session_routes") == [("kept",)]
