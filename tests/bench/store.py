"""Committed turns per second at 1, 32 and 256 concurrent sessions, and bytes per stored token, on both databases.

Each rate is reported with the rate of the disk itself (one write and fsync at a time, in the same run and folder);
compare their ratio. Run `python -m tests.bench.store [--seconds N]`. No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import tempfile
import time
from array import array
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from sqlite3 import connect

from rich.console import Console
from rich.table import Table

from proxy.store.sql import codec
from proxy.store.store import Store
from proxy.types import Message, Role, SessionRecord
from tests.bench.load import Words
from tests.conftest import Postgres
from tests.databases import execute
from tests.interactions import interaction

CONCURRENCY = (1, 32, 256)
NEW_TOKENS, SAMPLED_TOKENS = 400, 400
TURNS, SESSION_TOKENS = 80, 60_000
MAX_TOKEN_ID = 150_000


def fsyncs_per_second(folder: Path, seconds: float) -> float:
    """Return the rate of a page write followed by an fsync, one at a time."""
    page, done, end = os.urandom(4096), 0, time.perf_counter() + seconds
    with (folder / "fsync").open("wb") as file:
        while time.perf_counter() < end:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
            done += 1
    return done / seconds


class Load:
    """Sessions that append turn after turn; each waits for its commit."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.turns = 0
        self.chance = random.Random(0)
        self.words = Words(0)
        self.messages = (Message(Role.USER, self.words.text(NEW_TOKENS * 4)),)
        self.answer = Message(Role.ASSISTANT, self.words.text(SAMPLED_TOKENS * 4))
        self.suffix = self.ids(NEW_TOKENS)
        self.output = self.ids(SAMPLED_TOKENS)

    def ids(self, count: int) -> array[int]:
        return array("i", [self.chance.randrange(MAX_TOKEN_ID) for _ in range(count)])

    async def talk(self, name: str, until: float) -> None:
        await self.store.starts.create_session(SessionRecord(name))
        template = interaction(name, suffix=self.suffix, output=self.output)
        number = 0
        while time.perf_counter() < until:
            await self.store.turns.append(
                replace(
                    template,
                    id=f"{name}.{number}",
                    session_id=name,
                    new_messages=self.messages,
                    output=self.answer,
                )
            )
            number += 1
            self.turns += 1


async def turns_per_second(url: str, sessions: int, seconds: float, label: str) -> float:
    store = Store.open(url, migrate=True)
    try:
        load = Load(store)
        until = time.perf_counter() + seconds
        await asyncio.gather(*(load.talk(f"{label}-{number}", until) for number in range(sessions)))
        return load.turns / seconds
    finally:
        await store.close()


async def store_long_session(url: str) -> tuple[int, int]:
    """Store a session of 80 turns; return its tokens, and the bytes of its message text as stored."""
    store = Store.open(url, migrate=True)
    per_turn = SESSION_TOKENS // TURNS // 2
    text = tokens = prefix = 0
    words, chance = Words(1), random.Random(1)
    try:
        await store.starts.create_session(SessionRecord("long"))
        parent = None
        for number in range(TURNS):
            ids = array("i", [chance.randrange(MAX_TOKEN_ID) for _ in range(2 * per_turn)])
            name = f"turn-{number:03}"
            node = interaction(name, parent=parent, suffix=ids[:per_turn], output=ids[per_turn:], prefix=prefix)
            logprobs = array("f", [-chance.random() for _ in range(per_turn)])
            messages = (Message(Role.USER, words.text(per_turn * 4)),)
            output = Message(Role.ASSISTANT, words.text(per_turn * 4))
            await store.turns.append(
                replace(node, session_id="long", logprobs=logprobs, new_messages=messages, output=output)
            )
            stored = (codec.encode_json([m.to_json() for m in messages]), codec.encode_json(output.to_json()))
            text += sum(len(part or b"") for part in stored)
            tokens += 2 * per_turn
            prefix, parent = tokens, name
    finally:
        await store.close()
    return tokens, text


def stored_bytes(url: str, folder: Path) -> int:
    """Return the size of all tables on disk in bytes."""
    if url.startswith("sqlite"):
        path = folder / "long.db"
        with closing(connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            connection.execute("VACUUM")
        return path.stat().st_size
    execute(url, "CHECKPOINT")
    size = "SELECT sum(pg_total_relation_size(relid)) FROM pg_catalog.pg_statio_user_tables"
    return int(execute(url, size)[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0)
    seconds = parser.parse_args().seconds
    console = Console()
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        postgres = Postgres(folder / "postgres")
        try:
            report(console, folder, postgres, seconds)
        finally:
            postgres.close()


def report(console: Console, folder: Path, postgres: Postgres, seconds: float) -> None:
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    disk = fsyncs_per_second(folder, seconds)
    rates = Table(
        f"turns/s ({NEW_TOKENS} new and {SAMPLED_TOKENS} sampled tokens)", "SQLite", "Postgres", "of fsyncs/s"
    )
    lite = f"sqlite:///{folder / 'rates.db'}"
    urls = (lite, postgres.create_database())
    for sessions in CONCURRENCY:
        found = [asyncio.run(turns_per_second(url, sessions, seconds, str(sessions))) for url in urls]
        ratios = ", ".join(f"{rate / disk:.2f}" for rate in found)
        rates.add_row(f"{sessions} sessions", *(f"{rate:,.0f}" for rate in found), ratios)
    console.print(f"write and fsync, one after the other: {disk:,.0f}/s")
    console.print(rates)
    sizes = Table(f"{TURNS} turns, {SESSION_TOKENS:,} tokens", "bytes/token", "without the text")
    for kind, url in (("SQLite", f"sqlite:///{folder / 'long.db'}"), ("Postgres", postgres.create_database())):
        asyncio.run(Store.open(url, migrate=True).close())
        before = stored_bytes(url, folder)
        tokens, text = asyncio.run(store_long_session(url))
        total = stored_bytes(url, folder) - before
        sizes.add_row(kind, f"{total / tokens:.1f}", f"{(total - text) / tokens:.1f}")
    console.print(sizes)


if __name__ == "__main__":
    main()
