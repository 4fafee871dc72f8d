"""Agents, trainers and the page never read a whole table: both databases find rows by an index.

So their cost does not grow with what is stored (`tests.bench.grown` measures it).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection, event
from sqlalchemy.engine import Engine

from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import metadata
from tests.support import Server, says, serving, user

# Their rows are few, whatever is stored: those of running calls, of processes, of the last day and of files.
_SMALL = {
    "intents",
    "unreplied",
    "capacity",
    "compatibility",
    "engine_pauses",
    "commit_marks",
    "answers",
    "archive_files",
}
_GROWING = "|".join(sorted(set(metadata.tables) - _SMALL))
# A search by a lower or an upper bound alone may find every row.
_SCAN = re.compile(rf"(?:SCAN|Seq Scan on) (?:{_GROWING})\b|SEARCH (?:{_GROWING}) USING .*\(\w+[<>]\?\)")
_SORT = re.compile(r"USE TEMP B-TREE FOR ORDER BY|Sort Key")

Seen = dict[str, Any]
"""Statements, each with values that it was run with."""


@contextmanager
def statements() -> Iterator[Seen]:
    """Collect the statements of all connections."""
    seen: Seen = {}

    def executed(_connection: Any, _cursor: Any, sql: str, values: Any, _context: Any, many: bool) -> None:
        seen[sql] = values[0] if many and values else values

    def compiled(statement: Statement, connection: Connection, rows: Any) -> None:
        first = rows[0] if isinstance(rows, list | tuple) else rows
        known = statement._compiled.get(connection.dialect.name)
        sql, pick, several = known or statement._compile(connection, first)
        picked = () if pick is None else pick(first)
        seen[sql] = picked if several or pick is None else (picked,)

    event.listen(Engine, "before_cursor_execute", executed)
    run, fetch = Statement.run, Statement.fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Statement, "run", lambda *given: (compiled(*given), run(*given))[1])
        patch.setattr(Statement, "fetch", lambda *given: (compiled(*given), fetch(*given))[1])
        yield seen
    event.remove(Engine, "before_cursor_execute", executed)


async def play(server: Server) -> None:
    """What agents, trainers and the page do, in sessions in memory and in stored ones."""
    for name in ("a", "b"):
        await server.ok("/rl/start_session", {"session_id": name, "task_id": "t", "group_id": "g"})
        first = await server.answer([user("hi")], name)
        server.forget_sessions()
        await server.answer([user("hi"), first, user("and")], name)
        await server.ok(f"/{name}/rl/set_reward", {"reward": 1.0})
        await server.ok(f"/{name}/rl/end_session", {})
    await server.ok("/trajectories/claim", {"limit": 2, "claim_id": "c"})
    await server.ok("/trajectories/claim", {"limit": 2, "group_size": 2})
    await server.ok("/trajectories/export", {"filter": {"group_id": "g"}, "layout": "concat"})
    await server.ok("/trajectories/acknowledge", {"claim_id": "c"})
    for path in (
        *("/rl/sessions?limit=10", "/rl/sessions?limit=10&order=newest&include=summary", "/rl/sessions?cursor=a"),
        *("/rl/sessions?limit=10&order=-reward", '/rl/sessions?filter={"trained_in":"grpo/1"}&order=newest&limit=10'),
        *(
            '/rl/sessions?filter={"trained_in":"grpo/1"}&order=metadata.step',
            "/rl/sessions?order=duration&partial=true",
        ),
        *("/rl/groups?limit=10", "/rl/statistics", "/rl/sessions/a", '/rl/sessions?filter={"group_id":"g"}'),
    ):
        response = await server.http.get(path)
        assert response.status_code == 200, response.text
    await server.app.state.store.changes.find_idle(time.time() - 60.0, 10)
    assert (await server.http.delete("/rl/sessions/b")).status_code == 200


def plan(connection: Connection, sql: str, values: Any) -> str:
    sqlite = connection.dialect.name == "sqlite"
    found = connection.exec_driver_sql(("EXPLAIN QUERY PLAN " if sqlite else "EXPLAIN ") + sql, values).all()
    return "\n".join(str(row[-1]) for row in found)


def scans(sql: str, plan: str) -> bool:
    """Whether a query reads a whole table or index. One that must sort does so before its limit.

    A hashed subplan of PostgreSQL reads all that any row may need, here other than the list of connections.
    """
    if "hashed SubPlan" in plan and "pg_stat_activity" not in sql:
        return True
    return bool(_SCAN.search(plan)) and len(_SORT.findall(plan)) >= sql.count("LIMIT")


async def test_no_request_scans_a_table_that_grows(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*["hi"] * 20), database_url=database_url) as server:
        with statements() as seen:
            await play(server)
        explained = [sql for sql in seen if re.match(r"(?:SELECT|UPDATE|DELETE|INSERT|WITH)\b", sql)]
        assert len(explained) > 40
        with server.app.state.store.database._reader_engine.connect() as connection:
            if connection.dialect.name != "sqlite":
                connection.exec_driver_sql("SET enable_seqscan = off")  # it is cheaper on an empty table
            plans = {sql: plan(connection, sql, seen[sql]) for sql in explained}
    assert {sql: found for sql, found in plans.items() if scans(sql, found)} == {}
