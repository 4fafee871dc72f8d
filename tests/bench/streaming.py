"""The cost of a streamed token beside an event of a bare streaming handler, and the added time to the first token.

Cost is CPU time of the server for each further token of a stream: long streams less short ones. Single tokens come at a
pace, so none is read together with another, unless the machine is too busy: see events a token. Pieces of 32 come at a
pace too. The bare handler yields as many events
from memory, each a write of its own, at once; beside it, the same at the pace of the single tokens.

The time to the first token is of one client alone: from the simulated engine server itself, through a bare pass-through
(aiohttp, bytes unread), and through the proxy. Run `python -m tests.bench.streaming` from the root of the repository.
No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import uvloop
from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from tests.bench.clients import Agent
from tests.bench.load import Words, new_path
from tests.bench.overhead import assets_tokenizer, machine, remote_proxy
from tests.bench.servers import Server, on_core, server_process
from tests.bench.upstream import Pace, chat_chunk
from tests.support import free_port

CHARACTERS = 2500
SHORT, LONG = 32, 288
STREAMS = 64
ROUNDS = 4
RATE, PIECE_TOKENS = 50.0, 32
FIRST_TOKENS = 200
UPSTREAM_VARIABLE = "TOKENGROVE_TEST_BENCH_UPSTREAM"
SINGLE, PIECES = "a token that comes alone", f"a token in pieces of {PIECE_TOKENS}"
PACES = {SINGLE: Pace(1, RATE), PIECES: Pace(PIECE_TOKENS, RATE * PIECE_TOKENS)}
GOALS = {SINGLE: 3.0, PIECES: 1.5}
BARE, BARE_PACED = "an event of the bare handler", "the same, at the pace of single tokens"


def bare_app() -> Starlette:
    """Build the bare handlers: streams from memory, at once or paced, and a pass-through. A factory for uvicorn."""
    event = b"data: %s\n\n" % chat_chunk(0, 1, 2)

    async def events(count: int, pause_s: float) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield event
            await asyncio.sleep(pause_s)  # even 0 makes each event a write of its own

    async def stream(request: Request) -> Response:
        body = orjson.loads(await request.body())
        pause_s = 1 / RATE if request.url.path == "/paced" else 0.0
        return StreamingResponse(events(body["max_tokens"], pause_s), media_type="text/event-stream")

    async def forwarded(asked: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        async with asked:
            async for piece in asked.content.iter_any():
                yield piece

    async def forward(request: Request) -> Response:
        asked = await request.app.state.http.post("/v1/chat/completions", data=await request.body())
        return StreamingResponse(forwarded(asked), asked.status, media_type="text/event-stream")

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(os.environ[UPSTREAM_VARIABLE]) as app.state.http:
            yield

    ways = {"/bare": stream, "/paced": stream, "/v1/chat/completions": forward}
    return Starlette(routes=[Route(path, way, methods=["POST"]) for path, way in ways.items()], lifespan=lifespan)


def bare_streams(folder: Path, upstream: Server) -> AbstractContextManager[Server]:
    port = free_port()
    arguments = ["-m", "uvicorn", "--factory", "tests.bench.streaming:bare_app", "--port", str(port)]
    arguments += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--log-level", "warning"]
    return server_process(arguments, port, folder, **{UPSTREAM_VARIABLE: upstream.url})


def body_of(words: Words, tokens: int) -> bytes:
    """Return a streamed request of one user message."""
    body: dict[str, Any] = {"model": "bench", "max_tokens": tokens, "stream": True}
    return orjson.dumps({**body, "messages": [{"role": "user", "content": words.text(CHARACTERS)}]})


async def connected(server: Server) -> Agent:
    _, agent = await asyncio.get_running_loop().create_connection(Agent, "127.0.0.1", server.port)
    return agent


async def set_pace(upstream: Server, pace: Pace) -> None:
    agent = await connected(upstream)
    await agent.post("/pace", orjson.dumps(pace.to_json()))
    agent.close()


async def streams_cpu_ns(server: Server, path: Callable[[], str], words: Words, tokens: int) -> tuple[int, int]:
    """Return the CPU time of the server for streams that run at once, and their events."""
    agents = [await connected(server) for _ in range(STREAMS)]
    before = server.cpu_ns()
    answers = await asyncio.gather(*(agent.post(path(), body_of(words, tokens)) for agent in agents))
    spent = server.cpu_ns() - before
    for agent in agents:
        agent.close()
    return spent, sum(answer.count(b"data: ") for answer in answers)


@dataclass(slots=True)
class Costs:
    """CPU time of the server in ns, and events, over all streams of one length."""

    short: list[tuple[int, int]] = field(default_factory=list)
    long: list[tuple[int, int]] = field(default_factory=list)

    async def add(self, server: Server, path: Callable[[], str], words: Words) -> None:
        """Run one round of short and of long streams."""
        self.short.append(await streams_cpu_ns(server, path, words, SHORT))
        self.long.append(await streams_cpu_ns(server, path, words, LONG))

    @property
    def token_us(self) -> float:
        """CPU time for one further token."""
        return self._more(0) / 1e3

    @property
    def events(self) -> float:
        """Events for one further token: 1 unless tokens that came alone were read together."""
        return self._more(1)

    def _more(self, column: int) -> float:
        """The median over the rounds of what long streams have more, for a token."""
        rounds = zip(self.long, self.short, strict=True)
        return statistics.median(long[column] - short[column] for long, short in rounds) / STREAMS / (LONG - SHORT)


@dataclass(slots=True)
class Bench:
    """The servers of a run and its figures. `firsts`: times to the first token in ms, by the server that was asked."""

    proxy: Server
    upstream: Server
    bare: Server
    words: Words = field(default_factory=lambda: Words(0))
    costs: dict[str, Costs] = field(default_factory=dict)
    firsts: dict[str, list[float]] = field(default_factory=dict)

    async def run(self) -> None:
        for _ in range(ROUNDS + 1):  # the first round warms up
            for name, pace in PACES.items():
                await set_pace(self.upstream, pace)
                await self._both_lengths(name, self.proxy, None)
            await self._both_lengths(BARE, self.bare, "/bare")
            await self._both_lengths(BARE_PACED, self.bare, "/paced")
        await set_pace(self.upstream, Pace())
        await self._first_tokens()

    async def _both_lengths(self, name: str, server: Server, path: str | None) -> None:
        paths = (lambda: path) if path else new_path
        if name in self.costs:
            await self.costs[name].add(server, paths, self.words)
        else:  # warms up
            self.costs[name] = Costs()
            await streams_cpu_ns(server, paths, self.words, SHORT)

    async def _first_tokens(self) -> None:
        """Ask the three servers in turn, one request at a time."""
        path = "/v1/chat/completions"
        asked = {"engine": (self.upstream, path), "pass-through": (self.bare, path), "proxy": (self.proxy, None)}
        agents = {name: await connected(server) for name, (server, _) in asked.items()}
        for number in range(FIRST_TOKENS):
            for name, (_, fixed) in asked.items():
                agent, body = agents[name], body_of(self.words, 4)
                begun, agent.first_ns = time.monotonic_ns(), 0
                await agent.post(fixed or new_path(), body)
                if number >= FIRST_TOKENS // 10:
                    self.firsts.setdefault(name, []).append((agent.first_ns - begun) / 1e6)
        for agent in agents.values():
            agent.close()


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(bench: Bench, console: Console) -> None:
    table = Table(title=f"Streams, {STREAMS} at once", title_justify="left")
    table.add_column("")
    for column in ("CPU us", "ratio", "goal", "events a token"):
        table.add_column(column, justify="right")
    bare_us = bench.costs[BARE].token_us
    for name in (SINGLE, PIECES, BARE, BARE_PACED):
        costs = bench.costs[name]
        goal = f"{GOALS[name]:g}" if name in GOALS else ""
        table.add_row(name, f"{costs.token_us:.1f}", f"{costs.token_us / bare_us:.1f}", goal, f"{costs.events:.2f}")
    console.print(table)
    table = Table(title="Time to the first token, one client", title_justify="left")
    table.add_column("asked")
    for column in ("p50 ms", "p99 ms", "added p50 ms", "added p99 ms"):
        table.add_column(column, justify="right")
    engine = bench.firsts["engine"]
    for name, times in bench.firsts.items():
        figures = [quantile(times, share) for share in (0.5, 0.99)]
        added = [figure - quantile(engine, share) for figure, share in zip(figures, (0.5, 0.99), strict=True)]
        table.add_row(name, *(f"{figure:.2f}" for figure in (*figures, *added)))
    console.print(table)


def run(tokenizer: Path | None) -> Bench:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy, upstream = stack.enter_context(remote_proxy(folder, tokenizer))
        bench = Bench(proxy, upstream, stack.enter_context(bare_streams(folder, upstream)))
        stack.enter_context(on_core(1))
        uvloop.run(bench.run())
        return bench


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    name = options.tokenizer.name if options.tokenizer else "built in"
    console.print(f"{machine()}, tokenizer {name}\n", highlight=False)
    report(run(options.tokenizer), console)


if __name__ == "__main__":
    main()
