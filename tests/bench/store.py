"""What the store costs: committed turns per second and CPU per turn at 1, 32 and 256 concurrent clients, statements and
entries of Python functions per turn, and bytes per stored token, on both databases.

A turn is all that a server asks of the store for one: the state of the session, the begin, the commit, the note that
the reply went out. Each rate is reported with the rate of the disk itself (one write and fsync at a time, in the same
run and folder); compare their ratio. Run `python -m tests.bench.store [--seconds N]`. No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from sqlite3 import connect

import uvloop
from rich.console import Console
from rich.table import Table

from proxy.store.news import Seen
from proxy.store.sql import codec
from proxy.store.sql.statement import Statement
from proxy.store.store import Store
from proxy.types import Interaction, Message, Role, SessionRecord
from tests.bench.counting import Counting
from tests.bench.load import Words
from tests.conftest import Postgres
from tests.databases import execute
from tests.interactions import interaction

CONCURRENCY = (1, 32, 256)
FRESH, LATER = "fresh sessions", "later turns"
KINDS = (FRESH, LATER)
COUNTED_TURNS = 200
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
    """Clients that commit turn after turn, each waiting for its commit. `fresh`: every turn has its own session."""

    def __init__(self, store: Store, *, fresh: bool) -> None:
        self.store, self.fresh = store, fresh
        self.turns = 0
        self.chance = random.Random(0)
        self.words = Words(0)
        self.messages = (Message(Role.USER, self.words.text(NEW_TOKENS * 4)),)
        self.answer = Message(Role.ASSISTANT, self.words.text(SAMPLED_TOKENS * 4))
        self.suffix = self.ids(NEW_TOKENS)
        self.output = self.ids(SAMPLED_TOKENS)

    def ids(self, count: int) -> array[int]:
        return array("i", [self.chance.randrange(MAX_TOKEN_ID) for _ in range(count)])

    async def talk(self, name: str, goes_on: Callable[[int], bool]) -> None:
        template = interaction(name, suffix=self.suffix, output=self.output)
        number = 0
        while goes_on(number):
            session = f"{name}.{number}" if self.fresh else name
            turn = replace(
                template,
                id=f"{name}.{number}",
                session_id=session,
                new_messages=self.messages,
                output=self.answer,
            )
            await self.turn(turn, 0 if self.fresh else number)
            number += 1
            self.turns += 1

    async def turn(self, turn: Interaction, number: int) -> None:
        store, seen = self.store, Seen(number, 0)
        if store.turns.shared or not number:
            await store.news.load_news(turn.session_id, seen)
        if not number:
            store.starts.create_session(SessionRecord(turn.session_id), urgent=False)
        store.turns.note_begun(turn.id, turn.session_id, turn.request_hash)
        await store.turns.append(turn, seen if store.turns.shared else None)
        store.turns.note_replied(turn.id)


@dataclass(frozen=True, slots=True)
class Cost:
    """Committed turns per second, and CPU time of this process per turn in microseconds."""

    rate: float
    cpu_us: float


async def cost(url: str, clients: int, seconds: float, *, fresh: bool) -> Cost:
    store = Store.open(url, migrate=True)
    try:
        load = Load(store, fresh=fresh)
        label = f"{clients}-{'fresh' if fresh else 'later'}"
        begin, cpu = time.perf_counter(), time.process_time()
        until = begin + seconds
        names = (f"{label}-{number}" for number in range(clients))
        await asyncio.gather(*(load.talk(name, lambda _: time.perf_counter() < until) for name in names))
        spent = time.process_time() - cpu
        return Cost(load.turns / (time.perf_counter() - begin), spent / load.turns * 1e6)
    finally:
        await store.close()


async def entries(url: str, *, fresh: bool) -> tuple[float, float]:
    """Return the entries of Python functions and the statements per turn of one client."""
    counting = Counting()
    counting.start()
    try:
        store = Store.open(url, migrate=True)
        load = Load(store, fresh=fresh)
        name = "fresh" if fresh else "later"
        await load.talk(f"{name}-warm", lambda number: number < COUNTED_TURNS // 10)
        counting.on = True
        await load.talk(f"{name}-counted", lambda number: number < COUNTED_TURNS)
        counting.on = False
        await store.close()
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    functions = counting.by_function()
    ours = {f"{__name__}.Load.{part}" for part in ("talk", "turn")} | {"dataclasses.replace"}
    found = sum(count for function, count in functions.items() if function not in ours)
    statements = sum(functions[f"{Statement.__module__}.Statement.{part}"] for part in ("run", "fetch"))
    return found / COUNTED_TURNS, statements / COUNTED_TURNS


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
    console.print(f"write and fsync, one after the other: {disk:,.0f}/s")
    urls = (f"sqlite:///{folder / 'rates.db'}", postgres.create_database())
    columns = ("SQLite", "Postgres", "of fsyncs/s", "CPU, SQLite", "CPU, Postgres", "ratio")
    rates = Table("clients", *columns, title=f"turns/s, us a turn; {NEW_TOKENS} new, {SAMPLED_TOKENS} sampled tokens")
    for kind in KINDS:
        for clients in CONCURRENCY:
            found = [uvloop.run(cost(url, clients, seconds, fresh=kind == FRESH)) for url in urls]
            rates.add_row(
                f"{clients}, {kind}",
                *(f"{each.rate:,.0f}" for each in found),
                ", ".join(f"{each.rate / disk:.2f}" for each in found),
                *(f"{each.cpu_us:,.0f}" for each in found),
                f"{found[1].cpu_us / found[0].cpu_us:.2f}",
            )
    console.print(rates)
    counts = Table("a turn of one client", "SQLite: entries", "statements", "Postgres: entries", "statements")
    for kind in KINDS:
        counted = [uvloop.run(entries(url, fresh=kind == FRESH)) for url in urls]
        counts.add_row(kind, *(f"{figure:.1f}" for pair in counted for figure in pair))
    console.print(counts)
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
