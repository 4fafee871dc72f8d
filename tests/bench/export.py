"""Exports of many long sessions: tokens per second by format, memory above idle, and what they cost running turns.

The server runs on one core; reader and load run on another where there are two. Latencies with and without an export
come from the same run. No figure fails the bench. Run `python -m tests.bench.export [--sessions N] [--tokens N]
[--formats ...]`."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import platform
import random
import socket
import tempfile
import threading
import time
from array import array
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from proxy.store.store import Store
from proxy.types import Message, Role, SessionRecord
from tests.bench.load import Conversation, Series, Words, sending, under_load
from tests.bench.servers import Server, on_core, proxy_server
from tests.interactions import interaction

BINARY = ("npz", "safetensors", "arrow", "parquet")
FORMATS = (*BINARY, "json", "jsonl", "areal")
TURNS = 20
MAX_TOKEN_ID = 150_000
PAGE = 1000
QUIET_S = 5.0


async def fill(url: str, sessions: int, tokens: int) -> None:
    """Store chains of `TURNS` turns. Half of each turn's tokens are sampled; text has about 4 characters per token."""
    store = Store.open(url, migrate=True)
    chance, words = random.Random(0), Words(0)
    half = tokens // TURNS // 2
    pool = array("i", [chance.randrange(MAX_TOKEN_ID) for _ in range(64 * half)])
    values = array("f", [-chance.random() for _ in range(64 * half)])
    texts = [words.text(half * 4) for _ in range(32)]
    try:
        for number in range(sessions):
            name = f"session-{number:05}"
            await store.starts.create_session(SessionRecord(name, group_id=f"group-{number // 8}"))
            parent, prefix = None, 0
            for turn in range(TURNS):
                starts = [chance.randrange(63 * half) for _ in range(3)]
                suffix, output = (pool[at : at + half] for at in starts[:2])
                logprobs = values[starts[2] : starts[2] + half]
                made = interaction(f"{name}.{turn}", parent=parent, suffix=suffix, output=output, prefix=prefix)
                question = Message(Role.USER, chance.choice(texts))
                answer = Message(Role.ASSISTANT, chance.choice(texts))
                made = replace(
                    made,
                    session_id=name,
                    versions=((half, number),),
                    logprobs=logprobs,
                    new_messages=(question,),
                    output=answer,
                )
                await store.turns.append(made)
                parent, prefix = made.id, prefix + 2 * half
            await store.changes.set_rewards(name, {parent or "": {"reward": chance.random()}})
    finally:
        await store.close()


def resident_bytes(server: Server) -> int:
    """Return the server's resident memory in bytes; 0 if the system does not report it."""
    statm = Path(f"/proc/{server.pid}/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0


def read_export(server: Server, name: str, sessions: int, **options: Any) -> int:
    """Read all pages; return the number of bytes received. `options`: further ones of the export."""
    received, cursor = 0, None
    for _ in range(-(-sessions // PAGE)):
        body = {
            "layout": "concat",
            "format": name,
            "filter": {"task_id": ""},
            "limit": PAGE,
            "cursor": cursor,
            **options,
        }
        count, cursor = _read_page(server, orjson.dumps(body))
        received += count
    return received


def _read_page(server: Server, body: bytes) -> tuple[int, str | None]:
    """Return the size of the answer in bytes and its cursor. Raises RuntimeError unless the answer is whole."""
    head = b"POST /export_trajectories HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += b"content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    buffer, received, tail, start = bytearray(1 << 20), 0, b"", b""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head % len(body) + body)
        while count := connection.recv_into(buffer):
            received += count
            start = start or bytes(buffer[: min(count, 2000)])
            tail = (tail + bytes(buffer[max(count - 8, 0) : count]))[-8:]
    if not start.startswith(b"HTTP/1.1 200") or not tail.endswith(b"0\r\n\r\n"):
        raise RuntimeError(f"the export broke off: {start[:300]!r}")
    marker = start.lower().partition(b"x-tokengrove-cursor: ")[2].split(b"\r\n", 1)[0]
    return received, marker.decode() or None


@dataclass(slots=True)
class Watch:
    """Records the server's peak memory in bytes while `run` runs."""

    server: Server
    peak: int = 0
    over: bool = False

    def run(self) -> None:
        while not self.over:
            self.peak = max(self.peak, resident_bytes(self.server))
            time.sleep(0.01)


@dataclass(frozen=True, slots=True)
class Result:
    seconds: float
    received: int
    peak: int


def measure(server: Server, name: str, sessions: int, **options: Any) -> Result:
    watch = Watch(server)
    thread = threading.Thread(target=watch.run)
    thread.start()
    begun = time.perf_counter()
    received = read_export(server, name, sessions, **options)
    seconds = time.perf_counter() - begun
    watch.over = True
    thread.join()
    return Result(seconds, received, watch.peak)


async def turns_while(server: Server, reader: multiprocessing.process.BaseProcess | None) -> Series:
    """Run first turns of new sessions, one at a time, for `QUIET_S` or as long as `reader` is alive."""
    series, words = Series(), Words(1)
    end = time.perf_counter() + QUIET_S
    while reader.is_alive() if reader is not None else time.perf_counter() < end:
        conversation = Conversation(words)
        works = [sending([(conversation.path, conversation.next_body())])]
        await under_load(server, works, series, QUIET_S)
    return series


def turns_during(server: Server, name: str, sessions: int) -> Series:
    """Run turns while another process reads an export; a reader in this process would delay the load."""
    reader = multiprocessing.get_context("fork").Process(target=read_export, args=(server, name, sessions))
    reader.start()
    series = uvloop.run(turns_while(server, reader))
    reader.join()
    return series


def row(server: Server, name: str, sessions: int, tokens: int) -> list[str]:
    idle = resident_bytes(server)
    first = measure(server, name, sessions)
    second = measure(server, name, sessions)
    uvloop.run(turns_while(server, None))  # warms up
    before = uvloop.run(turns_while(server, None))
    during = turns_during(server, name, sessions)
    return [
        name,
        f"{sessions * tokens / second.seconds:,.0f}",
        f"{second.received / 1e6:,.0f}",
        f"{(max(first.peak, second.peak) - idle) / 1e6:.0f}",
        f"{before.quantile_ms(0.5):.2f} -> {during.quantile_ms(0.5):.2f}",
        f"{before.quantile_ms(0.99):.2f} -> {during.quantile_ms(0.99):.2f}",
        f"{during.quantile_ms(0.99) / before.quantile_ms(0.99):.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=20_000, help="of each session")
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    options = parser.parse_args()
    console = Console(width=110)
    console.print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {platform.platform()}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        asyncio.run(fill(f"sqlite:///{folder / 'bench.db'}", options.sessions, options.tokens))
        table = Table("format", "tokens/s", "MB", "MB beyond idle", "turn p50 ms", "p99 ms", "p99 / before")
        for chosen in options.formats:  # each format has a new server, so that its memory is due to this format only
            with proxy_server(folder, None) as server, on_core(1):
                table.add_row(*row(server, chosen, options.sessions, options.tokens))
        console.print(table)


if __name__ == "__main__":
    main()
