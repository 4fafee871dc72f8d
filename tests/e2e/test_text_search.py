"""The text index of a server that is killed has each turn once when another one has caught up."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx

from proxy.store.sql.texts import text_of
from tests.e2e.processes import server_process
from tests.e2e.test_durability import killed_under_load

FLAGS = ("--engine", "scripted", "--engine-arg", "tokens=40", "--engine-arg", "chunk=4")
_TABLE = "USING fts5(text, content='', tokenize='unicode61 remove_diacritics 0')"


def vocabulary(connection: sqlite3.Connection, schema: str, table: str) -> list[Any]:
    """Each word of an index, in how many turns it is, and how often."""
    connection.execute(f"CREATE VIRTUAL TABLE temp.of_{table} USING fts5vocab({schema}, {table}, row)")
    return connection.execute(f"SELECT term, doc, cnt FROM of_{table} ORDER BY term").fetchall()


def test_kill_9_loses_no_turn_of_the_index_and_indexes_none_twice(tmp_path: Path) -> None:
    chance, seen = random.Random(7), dict[str, str]()
    for search in (("--search",), (), ("--search",)):  # turns of a server without it are indexed later
        with server_process(tmp_path, *FLAGS, *search) as process:
            seen |= asyncio.run(killed_under_load(process, chance))
    assert seen
    with server_process(tmp_path, *FLAGS, "--search") as process:
        asyncio.run(caught_up(process.url))
    with closing(sqlite3.connect(next(tmp_path.glob("*.db")))) as connection:
        connection.execute(f"CREATE VIRTUAL TABLE temp.expected {_TABLE}")
        turns = connection.execute("SELECT new_messages, output FROM interactions").fetchall()
        connection.executemany("INSERT INTO expected (text) VALUES (?)", [(text_of(*turn),) for turn in turns])
        assert vocabulary(connection, "main", "turn_words") == vocabulary(connection, "temp", "expected")


async def caught_up(url: str) -> None:
    """Wait until a server has indexed everything."""
    async with httpx.AsyncClient(base_url=url) as http:

        async def is_whole() -> bool:
            answer = await http.get("/rl/sessions", params={"include": "counts", "limit": 1})
            whole: bool = answer.json()["unindexed"] == 0
            return whole

        while not await is_whole():
            pass
