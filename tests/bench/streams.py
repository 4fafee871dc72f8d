"""Many streams at once, each at 30 tokens a second: how late the tokens are, and what the server needs for it.

The simulated engine server, the proxy and the clients are processes of their own; the proxy has one core, the others
share the second. The engine server notes when it sent each part, the clients when text arrived, both by the monotonic
clock that all processes of a machine share. The delay of a token counts from when the engine had it, so it includes
the wait for the other tokens of its part, where the proxy asked for parts of several tokens; what is added on the way
is printed beside it. The loop's stall is the longest time that the server took to answer /health while streams ran.
Of a busy machine, the figures say little: see how long the server waited for its core, as a share of the time.

Run `python -m tests.bench.streams [64 128 256 512 1024]` from the root of the repository. No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.calls import Client
from tests.bench.load import Words, new_path
from tests.bench.overhead import assets_tokenizer, machine, remote_proxy
from tests.bench.servers import Server, on_core
from tests.bench.upstream import Pace

RATE = 30.0
TOKENS = 240
CHARACTERS = 1000
RAMP_S = 2.0
"""Streams begin at random times within these seconds, as agents do; with 0, all at one moment, as a group may."""

PROBE_S = 0.01
_CONTENT = re.compile(rb'"content":"([^"]*)"')
_LAST = b"0\r\n\r\n"


class Reader(asyncio.Protocol):
    """Reads one stream. While it runs, it only collects bytes and times, so that it delays no other."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.pieces: list[tuple[int, bytes]] = []
        self.begun_ns = 0
        self.ended = asyncio.get_running_loop().create_future()
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def begin(self) -> None:
        self.begun_ns = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.pieces.append((time.monotonic_ns(), data))
        if data.endswith(_LAST):
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self.ended.set_result(None)

    def arrivals(self) -> list[int]:
        """Return when each token had arrived whole, in ns. Each is a space and a word; an answer begins at the word."""
        times: list[int] = []
        whole = b"".join(data for _, data in self.pieces)
        if b" 200 " not in whole[:20]:
            raise RuntimeError(f"a stream failed: {whole[:500]!r}")
        ends, end = [], 0
        for at_ns, data in self.pieces:
            end += len(data)
            ends.append((end, at_ns))
        pieces = iter(ends)
        end, at_ns = next(pieces)
        for event in _CONTENT.finditer(whole):
            while event.end() > end:
                end, at_ns = next(pieces)
            stripped = bool(event[1]) and not times and not event[1].startswith(b" ")
            times += [at_ns] * (event[1].count(b" ") + stripped)
        return times


@dataclass(frozen=True, slots=True)
class Delays:
    """One run of many streams; times in ms. `added`: from the sending of a part to its arrival."""

    delays: list[float]
    added: list[float]
    firsts: list[float]
    part_tokens: float


def request_of(words: Words, seed: int) -> bytes:
    body = {"model": "bench", "max_tokens": TOKENS, "stream": True, "seed": seed}
    content = orjson.dumps({**body, "messages": [{"role": "user", "content": words.text(CHARACTERS)}]})
    head = f"POST {new_path()} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
    return b"%s%d\r\n\r\n%s" % (head.encode(), len(content), content)


async def read_streams(port: int, count: int, ramp_s: float) -> list[dict[str, Any]]:
    """Run the streams; return by stream its seed, when it began, and when each token arrived."""
    loop, words, times = asyncio.get_running_loop(), Words(count), random.Random(count)
    readers = []
    for seed in range(1, count + 1):
        reading = partial(Reader, request_of(words, seed))
        _, reader = await loop.create_connection(reading, "127.0.0.1", port)
        readers.append(reader)
    for reader in readers:
        loop.call_later(times.uniform(0, ramp_s), reader.begin)
    await asyncio.gather(*(reader.ended for reader in readers))
    return [
        {"seed": seed, "begun": reader.begun_ns, "arrivals": reader.arrivals()}
        for seed, reader in enumerate(readers, 1)
    ]


def delays_of(streams: list[dict[str, Any]], sent: dict[str, list[tuple[int, int]]]) -> Delays:
    """Join what the clients and the engine server noted."""
    delays, added, firsts, parts = [], [], [], 0
    for stream in streams:
        arrivals, noted = stream["arrivals"], sent[str(stream["seed"])]
        if len(arrivals) != TOKENS:
            raise RuntimeError(f"{len(arrivals)} tokens of {TOKENS} arrived")
        firsts.append((arrivals[0] - stream["begun"]) / 1e6)
        parts += len(noted)
        start = 0
        for sent_ns, end in noted:
            for place in range(start, end):
                made_ns = sent_ns - (end - 1 - place) / RATE * 1e9
                delays.append((arrivals[place] - made_ns) / 1e6)
                added.append((arrivals[place] - sent_ns) / 1e6)
            start = end
    return Delays(delays, added, firsts, len(delays) / parts)


class Stalls:
    """Asks the server for /health again and again."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._answers: list[tuple[int, int]] = []

    async def watch(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._server.port)
        while True:
            begun_ns = time.monotonic_ns()
            writer.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]))
            self._answers.append((begun_ns, time.monotonic_ns()))
            await asyncio.sleep(PROBE_S)

    def longest_ms(self, since_ns: int, until_ns: int) -> float:
        """Return the longest time of an answer that came between two times."""
        return max(ended - begun for begun, ended in self._answers if since_ns <= begun and ended <= until_ns) / 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """Figures of one run. `cpu_share`: of one core, while streams ran; `wait_share`: what it waited for the core."""

    count: int
    delays: Delays
    resident_mb: float
    stall_ms: float
    cpu_share: float
    wait_share: float


async def clients(port: int, count: int, ramp_s: float) -> list[dict[str, Any]]:
    """Run `read_streams` in a process of its own."""
    command = [sys.executable, "-m", "tests.bench.streams", "--read", str(port), "--ramp", str(ramp_s), str(count)]
    with tempfile.TemporaryFile() as output:
        await asyncio.to_thread(subprocess.run, command, stdout=output, check=True)
        output.seek(0)
        return list(orjson.loads(output.read()))


async def measure(proxy: Server, upstream: Client, count: int, ramp_s: float) -> Result:
    stalls = Stalls(proxy)
    watching = asyncio.create_task(stalls.watch())
    upstream.post("/sent", {})
    cpu_ns, waited_ns = proxy.cpu_ns(), proxy.waited_ns()
    streams = await clients(proxy.port, count, ramp_s)
    begun, ended = min(stream["begun"] for stream in streams), max(stream["arrivals"][-1] for stream in streams)
    shares = [spent / (ended - begun) for spent in (proxy.cpu_ns() - cpu_ns, proxy.waited_ns() - waited_ns)]
    watching.cancel()
    delays = delays_of(streams, upstream.post("/sent", {}))
    return Result(count, delays, resident_mb(proxy), stalls.longest_ms(begun, ended), *shares)


def resident_mb(server: Server) -> float:
    pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def quantiles(values: list[float]) -> list[str]:
    ordered = sorted(values)
    return [f"{ordered[min(len(ordered) - 1, int(share * len(ordered)))]:.0f}" for share in (0.5, 0.99)]


def report(results: list[Result], console: Console) -> None:
    table = Table(title=f"Streams of {RATE:g} tokens a second; times in ms, p50 and p99", title_justify="left")
    columns = ("streams", "delay", "p99", "added", "p99", "first token", "p99", "tokens a part")
    for column in (*columns, "RSS MB", "longest stall", "CPU share", "wait share"):
        table.add_column(column, justify="right")
    for result in results:
        delays = result.delays
        figures = [*quantiles(delays.delays), *quantiles(delays.added), *quantiles(delays.firsts)]
        rest = (f"{delays.part_tokens:.2f}", f"{result.resident_mb:.0f}", f"{result.stall_ms:.0f}")
        shares = (f"{result.cpu_share:.2f}", f"{result.wait_share:.2f}")
        table.add_row(str(result.count), *figures, *rest, *shares)
    console.print(table)


def run(counts: list[int], ramp_s: float, tokenizer: Path | None) -> list[Result]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy, engine = stack.enter_context(remote_proxy(folder, tokenizer))
        stack.enter_context(on_core(1))
        upstream = Client(engine)
        stack.callback(upstream.close)
        upstream.post("/pace", Pace(rate=RATE).to_json())
        uvloop.run(measure(proxy, upstream, 8, ramp_s))  # warms up
        return [uvloop.run(measure(proxy, upstream, count, ramp_s)) for count in counts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[64, 128, 256, 512, 1024], help="streams at once")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    parser.add_argument("--ramp", type=float, default=RAMP_S, metavar="S", help="seconds in which the streams begin")
    parser.add_argument("--read", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.read:
        sys.stdout.write(orjson.dumps(uvloop.run(read_streams(options.read, options.counts[0], options.ramp))).decode())
        return
    console = Console(width=max(140, Console().width))
    name = options.tokenizer.name if options.tokenizer else "built in"
    console.print(f"{machine()}, tokenizer {name}\n", highlight=False)
    report(run(options.counts, options.ramp, options.tokenizer), console)


if __name__ == "__main__":
    main()
