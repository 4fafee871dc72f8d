"""Sessions to archive, and what a database has of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from proxy.store.backup import export_all
from proxy.store.dump import Totals
from tests.databases import execute
from tests.support import Server, assistant, says, serving, user

SECRET = "the-word-that-must-go"


async def grow(folder: Path, url: str) -> None:
    """Three old sessions that were exported, one with three turns and one without; one that nobody exported."""
    async with serving(
        folder, says("one", "two", "three", "vierä\U0001f600", SECRET * 500, "x"), database_url=url
    ) as server:
        await grow_tree(server)
        await server.chat([user(SECRET)], session="second")
        await server.ok("/second/rl/end_session", {})
        keys = await server.ok("/rl/start_session", {"session_id": "empty", "task_id": "t", "group_id": "g"})
        assert keys["api_key"]
        await server.ok("/empty/rl/rotate_keys", {})
        await server.ok("/empty/rl/end_session", {})
        await server.chat([user("unseen")], session="unseen")
        await server.ok("/unseen/rl/end_session", {})
        await server.ok("/export_trajectories", {"session_ids": ["s", "second", "empty"]})


async def grow_tree(server: Server) -> None:
    """Session s: a root with two children, rewarded and ended."""
    first = [user("a")]
    answer = (await server.answer(first))["content"]
    for words in ("b", "c"):
        await server.chat([*first, assistant(answer), user(words)], session="s")
    await server.ok("/s/rl/set_reward", {"reward": 0.1, "name": "style"})
    await server.ok("/s/rl/end_session", {"reward": 1.0, "metrics": {"x": [1, None]}, "outcome": "Finished"})


def dumped(url: str, folder: Path) -> list[Any]:
    """The sessions of a database in order of their ids, with all their rows."""
    path = folder / "dump.jsonl"
    export_all(url, str(path), quiet)
    found = [entry for entry in map(orjson.loads, path.read_bytes().splitlines()) if "session" in entry]
    return sorted(found, key=lambda entry: str(entry["session"]["session_id"]))


def there(url: str, table: str = "sessions") -> set[str]:
    return {row[0] for row in execute(url, f"SELECT session_id FROM {table}")}


def quiet(_: Totals) -> None:
    pass
