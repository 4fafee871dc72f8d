"""The cost of side columns: bytes a token in the store and in exports, CPU of a turn, memory, and streamed exports.

A simulated engine in the server's process reports them: 8 experts of 128 in each of 48 layers (uint8), and sets of 20
kept ids. Each case runs in a process of its own, with the same clients with and without columns, so that only their
difference counts. Entries of Python functions do not depend on how busy the machine is; times and memory do.

Run `python -m tests.bench.columns [sizes turns memory export]` from the root of the repository. No figure fails the
bench."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from sqlite3 import connect
from typing import Any

import httpx
import numpy as np
import orjson
from rich.console import Console
from rich.table import Table

from proxy.app import build_app
from proxy.engine.chunks import TokenChunk
from proxy.engine.interface import EngineInfo
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import babble
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, Columns
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.store.store import Store
from proxy.types import SessionRecord
from tests.bench.counting import Counting
from tests.bench.export import BINARY, FORMATS, measure, read_export, resident_bytes
from tests.bench.servers import on_core, proxy_server
from tests.conftest import Postgres
from tests.databases import execute
from tests.interactions import interaction
from tests.support import JSON, tiny_renderer
from tokengrove.options.start import Replay

LAYERS, CHOSEN, EXPERT_COUNT, KEPT_IDS = 48, 8, 128, 20
ROW_BYTES = LAYERS * CHOSEN
VOCABULARY, POOL_ROWS = 640, 4096
SESSIONS, TURNS, TURN_TOKENS = 64, 20, 1600
"""Of the memory case: 32,000 tokens a session. Half of the tokens of a turn are sampled."""
DELAY_S = 0.02
CPU_TURNS, COUNTED_TURNS, PIECE = 200, 30, 32
EXPORT_SESSIONS, SIZE_SESSIONS = 82, 4

NONE: tuple[str, ...] = ()
MASK, EXPERTS_ONLY, BOTH = ("kept",), ("experts",), ("kept", "experts")


class Rows:
    """Rows of columns, random but equal in each run. Each call copies, as an engine that decodes an answer does."""

    def __init__(self) -> None:
        chance = np.random.default_rng(0)
        self._experts = chance.integers(0, EXPERT_COUNT, (POOL_ROWS, LAYERS, CHOSEN), np.uint8)
        self._ids = np.sort(chance.integers(0, VOCABULARY, (POOL_ROWS, KEPT_IDS)), -1).astype(np.uint16)

    def experts(self, start: int, count: int) -> SideColumn:
        at = np.arange(start, start + count) % POOL_ROWS
        return SideColumn(start, SideRows(self._experts[at]))

    def kept(self, start: int, count: int) -> Columns:
        at = np.arange(start, start + count) % POOL_ROWS
        sets = SideRows(self._ids[at].reshape(-1), np.full(count, KEPT_IDS, np.int32))
        floats = SideRows(np.full(count, -0.25, np.float32))
        return {KEPT: SideColumn(start, sets), KEPT_LOGPROBS: SideColumn(start, floats)}


class ColumnEngine(ScriptedEngine):
    """A scripted engine that reports the columns that it is asked for. `dense`: its model has no experts. `delay_s`:
    before each piece of a reply, so that replies run at once. `piece`: the tokens of each."""

    def __init__(self, tokens: int, *, dense: bool = False, delay_s: float = 0.0, piece: int = PIECE) -> None:
        renderer = tiny_renderer()
        super().__init__(babble(tokens, renderer.vocab_size, piece, delay_s), vocab_size=renderer.vocab_size)
        self.keep_requests = False
        self._rows, self._dense = Rows(), dense

    def info(self) -> EngineInfo:
        records = {Replay.KEPT} if self._dense else {Replay.KEPT, Replay.EXPERTS}
        return replace(super().info(), records=frozenset(records), dense=self._dense)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        at, wanted = len(request.prompt), request.columns
        start = 0 if wanted is None else wanted.start
        async with aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                count = len(chunk.ids)
                if wanted is not None and count:
                    found: dict[str, SideColumn] = {}
                    if Replay.KEPT in wanted.replay:
                        found |= self._rows.kept(at, count)
                    if Replay.EXPERTS in wanted.replay:
                        found[EXPERTS] = self._rows.experts(start, at + count - 1 - start)
                        start = at + count - 1
                    chunk = replace(chunk, columns=found)
                at += count
                yield chunk


@asynccontextmanager
async def app(
    folder: Path, replay: Sequence[str], tokens: int, *, dense: bool, **more: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A server in this process, on a new database, and a client of it. `more`: of the engine."""
    url = f"sqlite:///{folder / 'bench.db'}"
    settings = Settings(database_url=url, migrate=True, replay=tuple(replay), log_level="warning")
    built = build_app(settings, engine=ColumnEngine(tokens, dense=dense, **more), renderer=tiny_renderer())
    client = httpx.AsyncClient(
        transport=httpx.ASGITransport(app=built), base_url="http://t", headers=JSON, timeout=600.0
    )
    async with built.router.lifespan_context(built), client:
        yield client


class Talk:
    """A session that repeats its conversation with each turn."""

    def __init__(self, client: httpx.AsyncClient, name: str, tokens: int) -> None:
        self._client, self._path, self._tokens = client, f"/{name}/v1/chat/completions", tokens
        self._messages: list[dict[str, Any]] = []

    async def turn(self, text: str) -> int:
        """Run a turn; return the number of tokens of its prompt and its answer."""
        self._messages.append({"role": "user", "content": text})
        body = {"model": "m", "messages": self._messages, "max_tokens": self._tokens}
        answer = await self._client.post(self._path, content=orjson.dumps(body))
        answer.raise_for_status()
        said = orjson.loads(answer.content)
        self._messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
        return int(said["usage"]["total_tokens"])


def text_of(tokens: int) -> str:
    """A text of about this many tokens."""
    renderer = tiny_renderer()
    return str(renderer.decode(renderer.encode("say what the tool found and go on. " * tokens)[:tokens]))


async def turns_case(replay: Sequence[str], *, dense: bool) -> dict[str, float]:
    """CPU time of a turn of 400 new and 400 sampled tokens, the server and its client together, and entries."""
    text = text_of(400)
    with tempfile.TemporaryDirectory() as name:
        async with app(Path(name), replay, 400, dense=dense) as client:
            for number in range(10):
                await Talk(client, f"warm-{number}", 400).turn(text)
            begun = time.process_time()
            for number in range(CPU_TURNS // 4):
                talk = Talk(client, f"timed-{number}", 400)
                for _ in range(4):
                    await talk.turn(text)
            return {"cpu_ms": (time.process_time() - begun) * 1e3 / CPU_TURNS}


async def entries_case(replay: Sequence[str], *, dense: bool) -> dict[str, float]:
    """Entries of Python functions of a first turn, the server and its client together: `entries` if its tokens come in
    pieces, `single` if they come one by one."""
    return {
        name: await entries_of(replay, dense=dense, piece=piece) for name, piece in (("entries", PIECE), ("single", 1))
    }


async def entries_of(replay: Sequence[str], *, dense: bool, piece: int) -> float:
    text, counting = text_of(400), Counting()
    counting.start()
    try:
        with tempfile.TemporaryDirectory() as name:
            async with app(Path(name), replay, 400, dense=dense, piece=piece) as client:
                for number in range(10):
                    await Talk(client, f"warm-{number}", 400).turn(text)
                counting.on = True
                for number in range(COUNTED_TURNS):
                    await Talk(client, f"counted-{number}", 400).turn(text)
                counting.on = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return counting.entries() / COUNTED_TURNS


def memory_status() -> str:
    """The memory of this process, as the system reports it."""
    return Path("/proc/self/status").read_text()


def forget_peak() -> None:
    """Begin to measure the peak of this process's memory anew."""
    Path("/proc/self/clear_refs").write_text("5")


async def memory_case(replay: Sequence[str], *, dense: bool) -> dict[str, float]:
    """Peak of resident memory in MB, of the process with server, engine and client, and tokens of a session."""
    half = TURN_TOKENS // 2
    text = text_of(half - 10)
    with tempfile.TemporaryDirectory() as name:
        async with app(Path(name), replay, half, dense=dense, delay_s=DELAY_S) as client:
            talks = [Talk(client, f"talk-{number}", half) for number in range(SESSIONS)]
            forget_peak()
            tokens = [0]
            for _ in range(TURNS):
                tokens = await asyncio.gather(*[talk.turn(text) for talk in talks])
            status = memory_status()
    found = {key: int(status.partition(f"{key}:")[2].split()[0]) * 1024 / 1e6 for key in ("VmHWM", "VmRSS")}
    return {"peak_mb": found["VmHWM"], "end_mb": found["VmRSS"], "tokens": max(tokens)}


CASES: Mapping[str, Callable[..., Any]] = {"turns": turns_case, "entries": entries_case, "memory": memory_case}


def in_process(case: str, replay: Sequence[str], *, dense: bool = False) -> dict[str, float]:
    """Run a case in a new process; return its figures."""
    command = [sys.executable, "-m", "tests.bench.columns", "--case", case, "--dense" if dense else "--moe", *replay]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case} failed:\n{done.stderr.decode()[-4000:]}")
    return dict(orjson.loads(done.stdout.splitlines()[-1]))


async def fill(url: str, sessions: int, replay: Sequence[str]) -> int:
    """Store sessions of `TURNS` turns with columns; return the number of their tokens."""
    store, rows, half = Store.open(url, migrate=True), Rows(), TURN_TOKENS // 2
    chance = np.random.default_rng(1)
    try:
        for number in range(sessions):
            name = f"session-{number:03}"
            await store.starts.create_session(SessionRecord(name))
            parent, prefix = None, 0
            for turn in range(TURNS):
                ids = array("i", chance.integers(0, VOCABULARY, 2 * half).astype(np.int32).tobytes())
                made = interaction(f"{name}.{turn}", parent=parent, suffix=ids[:half], output=ids[half:], prefix=prefix)
                logprobs = array("f", chance.random(half, np.float32).tobytes())
                made = replace(made, session_id=name, logprobs=logprobs)
                columns: dict[str, SideColumn] = {}
                if "experts" in replay:
                    first = max(prefix - 1, 0)
                    columns[EXPERTS] = rows.experts(first, prefix + 2 * half - 1 - first)
                if "kept" in replay:
                    columns |= rows.kept(prefix + half, half)
                made.replay = dict.fromkeys(columns, 0)
                await store.turns.append(made, columns=columns)
                parent, prefix = made.id, prefix + 2 * half
    finally:
        await store.close()
    return sessions * TURNS * TURN_TOKENS


def stored_bytes(url: str) -> int:
    """The size of all tables on disk in bytes."""
    if not url.startswith("sqlite"):
        execute(url, "CHECKPOINT")
        query = "SELECT sum(pg_total_relation_size(relid)) FROM pg_catalog.pg_statio_user_tables"
        return int(execute(url, query)[0][0])
    path = Path(url.removeprefix("sqlite:///"))
    with closing(connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return path.stat().st_size


def report_sizes(console: Console) -> None:
    """Bytes a token in stores and formats, as the difference of sessions with and without columns."""
    cases = {"experts": EXPERTS_ONLY, "kept": MASK}
    table = Table("in", "experts, bytes/token", "to 384", "kept sets, bytes/sampled token", title_justify="left")
    stores: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name).resolve()
        postgres = Postgres(folder / "postgres")
        try:
            for kind in ("SQLite", "Postgres"):
                found = {}
                for case, replay in {"none": NONE, **cases}.items():
                    (folder / case).mkdir(exist_ok=True)
                    sqlite = f"sqlite:///{folder / case / 'bench.db'}"
                    url = sqlite if kind == "SQLite" else postgres.create_database()
                    asyncio.run(fill(url, SIZE_SESSIONS, replay))
                    found[case] = stored_bytes(url)
                stores[kind] = {case: size - found["none"] for case, size in found.items()}
        finally:
            postgres.close()
        for chosen in FORMATS:
            found = {}
            for case, replay in {"none": NONE, **cases}.items():
                with proxy_server(folder / case, None) as server, on_core(1):
                    found[case] = read_export(server, chosen, SIZE_SESSIONS, replay=list(replay))
            stores[chosen] = {case: size - found["none"] for case, size in found.items()}
    tokens = SIZE_SESSIONS * TURNS * TURN_TOKENS
    for kind, sizes in stores.items():
        per = sizes["experts"] / tokens
        table.add_row(kind, f"{per:.1f}", f"{per / ROW_BYTES:.3f}", f"{sizes['kept'] / tokens * 2:.1f}")
    console.print(table)


def report_turns(console: Console, rounds: int) -> None:
    """CPU of a turn by columns, and entries of functions."""
    cases = {
        "none": (NONE, False),
        "kept, dense model": (MASK, True),
        "kept and experts, dense model": (BOTH, True),
        "experts": (EXPERTS_ONLY, False),
        "kept and experts": (BOTH, False),
    }
    columns = ("CPU ms a turn", "to none", f"entries, {PIECE} a piece", "entries, single tokens")
    table = Table("columns", *columns, title_justify="left")
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for case, (replay, dense) in cases.items():
            best[case] = min(best[case], in_process("turns", replay, dense=dense)["cpu_ms"])
    for case, (replay, dense) in cases.items():
        entered = [f"{entries:,.0f}" for entries in in_process("entries", replay, dense=dense).values()]
        table.add_row(case, f"{best[case]:.2f}", f"{best[case] / best['none']:.2f}", *entered)
    console.print(table)


def report_memory(console: Console) -> None:
    """Memory of 64 sessions, with columns and without."""
    found = {"none": in_process("memory", NONE), "kept and experts": in_process("memory", BOTH)}
    table = Table("columns", "tokens a session", "peak MB", "MB at the end", "peak MB more", title_justify="left")
    for case, each in found.items():
        more = each["peak_mb"] - found["none"]["peak_mb"]
        table.add_row(case, f"{each['tokens']:,.0f}", f"{each['peak_mb']:.0f}", f"{each['end_mb']:.0f}", f"{more:.0f}")
    console.print(table)


def report_export(console: Console, sessions: int) -> None:
    """Memory of a server beyond that before, while it exports a gigabyte of experts."""
    table = Table("format", "columns", "received MB", "peak MB beyond idle", "s", title_justify="left")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(fill(f"sqlite:///{folder / 'bench.db'}", sessions, EXPERTS_ONLY))
        for chosen in BINARY:
            for replay in (NONE, EXPERTS_ONLY):
                with proxy_server(folder, None) as server, on_core(1):
                    idle = resident_bytes(server)
                    result = measure(server, chosen, sessions, replay=list(replay))
                figures = f"{(result.peak - idle) / 1e6:.0f}", f"{result.seconds:.1f}"
                table.add_row(chosen, ", ".join(replay) or "none", f"{result.received / 1e6:,.0f}", *figures)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="of sizes, turns, memory and export; all if none is given")
    parser.add_argument("--rounds", type=int, default=3, help="of the turns; the best counts")
    parser.add_argument("--sessions", type=int, default=EXPORT_SESSIONS, help="of the export, 12 MB each")
    parser.add_argument("--case", choices=tuple(CASES), help=argparse.SUPPRESS)
    parser.add_argument("--dense", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--moe", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        print(orjson.dumps(asyncio.run(CASES[options.case](options.parts, dense=options.dense))).decode())
        return
    console = Console(width=max(120, Console().width))
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    reports: dict[str, Callable[[], None]] = {
        "sizes": lambda: report_sizes(console),
        "turns": lambda: report_turns(console, options.rounds),
        "memory": lambda: report_memory(console),
        "export": lambda: report_export(console, options.sessions),
    }
    for part in options.parts or reports:
        reports[part]()


if __name__ == "__main__":
    main()
