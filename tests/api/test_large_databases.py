"""A server starts over many stored sessions with the same work as over few, and so do its first requests."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, event, insert, make_url

from proxy.store.sql.tables import interactions, sessions
from tests.support import default_url, says, serving, user

STEP = 100
"""Instructions of SQLite that are counted together."""


def fill(url: str, number: int) -> None:
    """Store `number` ended sessions of two turns, as older servers left them."""
    named = [f"old-{index:05}" for index in range(number)]
    ended = {"status": "ended", "discount": 1.0, "credit": "tree", "created_at": 1.0, "updated_at": 2.0, "next_seq": 2}
    turn = {"aligned": False, "reason": "first", "api": "chat", "status": "complete", "model": "m", "request_hash": "h"}
    turn |= {"prefix_length": 0, "prompt_tokens": 1, "output_tokens": 0, "trainable": True, "reasoning_tokens": 0}
    turn |= {"prompt_suffix": bytes(4), "output_ids": b"", "logprobs": b"", "created_at": 1.0}
    rows = [{"session_id": name, "task_id": name, "ended_order": order, **ended} for order, name in enumerate(named)]
    engine = create_engine(make_url(url))
    with engine.begin() as connection:
        connection.execute(insert(sessions), rows)
        turns = [{"id": f"{name}-{seq}", "session_id": name, "seq": seq, **turn} for name in named for seq in (0, 1)]
        connection.execute(insert(interactions), turns)
    engine.dispose()


class Work:
    """What a database does for a server: statements, and for SQLite hundreds of instructions of its machine."""

    statements = steps = 0


@contextmanager
def counted() -> Iterator[Work]:
    work = Work()

    def connected(connection: Any, record: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.set_progress_handler(step, STEP)

    def step() -> int:
        work.steps += 1
        return 0

    def executed(*ignored: object) -> None:
        work.statements += 1

    listeners = (("connect", connected), ("before_cursor_execute", executed))
    for name, listener in listeners:
        event.listen(Engine, name, listener)
    try:
        yield work
    finally:
        for name, listener in listeners:
            event.remove(Engine, name, listener)


async def start(folder: Path, url: str) -> tuple[int, int]:
    """Start a server up to its first healthy answer, and return the statements and steps of its database."""
    with counted() as work:
        async with serving(folder, says("yes"), database_url=url) as server:
            assert (await server.http.get("/ready")).status_code == 200  # not /metrics, which counts sessions
            return work.statements, work.steps


async def test_a_start_over_ten_times_the_sessions_is_no_more_work(tmp_path: Path) -> None:
    works = []
    for number in (1, 300, 3000):  # the first start prepares what the process keeps
        (folder := tmp_path / str(number)).mkdir()
        fill(url := default_url(folder), number)
        works.append(await start(folder, url))
    _, (few, few_steps), (many, many_steps) = works
    assert many == few
    assert many_steps - few_steps <= 3, "thousands of rows take tens of thousands of instructions"


async def test_a_start_over_ten_times_the_sessions_runs_the_same_statements_on_postgres(
    tmp_path: Path, postgres: Any
) -> None:
    works = []
    for number in (1, 30, 300):
        fill(url := postgres.create_database(postgres.migrated), number)
        works.append(await start(tmp_path, url))
    assert works[1] == works[2]


async def test_sessions_of_earlier_servers_are_found_and_new_ones_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(default_url(tmp_path), 12)
    monkeypatch.setattr("proxy.store.known_sessions._PAGE", 5)
    async with serving(tmp_path, says(*["yes"] * 4)) as server:
        for name in ("new-1", "new-2", "new-3"):
            await server.chat([user("hi")], session=name)
            refused = await server.post("/old-00007/v1/chat/completions", {"model": "m", "messages": [user("hi")]})
            assert refused.status_code == 403 and "has ended" in refused.text
        assert len(await server.tree("old-00011")) == 2
