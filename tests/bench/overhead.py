"""CPU time of the server for a turn, as a ratio to a bare handler of the same JSON in the same run.

The engine is a simulated SGLang server that answers at once, in a process of its own, so all time is the proxy's;
once more, the scripted engine in the server's process. Every request is in a session of its own, except later turns.
The server has one core, its load and the engine server have the other. The ratio is of CPU times, since these change
less than wall times on a busy machine; wall times are printed beside it. No figure fails the bench.

Run `python -m tests.bench.overhead [--in-flight 256] [--quick]` from the root of the repository."""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.load import Conversation, Sent, Series, Words, connect, conversing, new_path, sending, under_load
from tests.bench.servers import Server, allow_open_files, bare_server, on_core, proxy_server
from tests.bench.upstream import model_of, upstream_server, word_tokens

LAST_TURN = 20
GROUP = 8
FRESH, SHARED, LATER = "fresh text", f"groups of {GROUP} share their prompt", f"turns 2 to {LAST_TURN}"
SCRIPTED = f"scripted engine, groups of {GROUP}"
GOALS = {FRESH: 11, SHARED: 8, LATER: 11, SCRIPTED: 7}
PHASE_S = 60.0
WARM_UP = 40


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: requests in flight, first turns a round, and rounds."""

    in_flight: int = 32
    first_turns: int = 480
    rounds: int = 4

    @property
    def requests(self) -> int:
        """First turns of a round: at least three on each connection."""
        return max(self.first_turns, 3 * self.in_flight)


@dataclass(slots=True)
class Pair:
    """The proxy and the bare handler under the same load."""

    proxy: Series = field(default_factory=Series)
    bare: Series = field(default_factory=Series)

    @property
    def ratio(self) -> float:
        return self.proxy.cpu_us / self.bare.cpu_us


Results = dict[str, Pair]


class Bench:
    """Rounds of all loads, between two of the bare handler, so that a slow moment affects both."""

    def __init__(self, remote: Server, scripted: Server, bare: Server, plan: Plan, words: Words) -> None:
        self._remote, self._scripted, self._bare = remote, scripted, bare
        self._plan = plan
        self._words = words
        self.results: Results = {name: Pair() for name in GOALS}

    async def run(self) -> None:
        for server in (self._remote, self._scripted, self._bare):
            await under_load(server, [sending(self._fresh(WARM_UP))], Series(), PHASE_S)
        for _ in range(self._plan.rounds):
            await self._first_turns(FRESH, self._remote, self._fresh(self._plan.requests))
            await self._first_turns(SHARED, self._remote, self._groups())
            await self._later_turns()
            await self._first_turns(SCRIPTED, self._scripted, self._groups())

    def _fresh(self, count: int) -> Sent:
        return [(new_path(), Conversation(self._words).next_body()) for _ in range(count)]

    def _groups(self) -> Sent:
        shared = self._fresh(self._plan.requests // GROUP)
        return [(new_path(), body) for _, body in shared for _ in range(GROUP)]

    async def _first_turns(self, name: str, proxy: Server, requests: Sent) -> None:
        works = [sending(requests[lane :: self._plan.in_flight]) for lane in range(self._plan.in_flight)]
        pair = self.results[name]
        await under_load(self._bare, works, pair.bare, PHASE_S)
        await under_load(proxy, works, pair.proxy, PHASE_S)
        await under_load(self._bare, works, pair.bare, PHASE_S)

    async def _later_turns(self) -> None:
        conversations = [Conversation(self._words, turns=LAST_TURN) for _ in range(self._plan.in_flight)]
        await under_load(self._remote, [conversing(one, 1, []) for one in conversations], Series(), PHASE_S)
        sent: list[Sent] = [[] for _ in conversations]
        works = [conversing(one, LAST_TURN - 1, kept) for one, kept in zip(conversations, sent, strict=True)]
        await under_load(self._remote, works, self.results[LATER].proxy, PHASE_S)
        await under_load(self._bare, [sending(kept) for kept in sent], self.results[LATER].bare, PHASE_S)


def report(results: Results, plan: Plan, console: Console) -> None:
    table = Table(title=f"Turns, {plan.in_flight} in flight", title_justify="left")
    table.add_column("request")
    for column in ("CPU ms", "bare CPU ms", "ratio", "goal", "turns/s", "p50 ms", "p99 ms", "bare turns/s"):
        table.add_column(column, justify="right")
    for name, pair in results.items():
        times = [f"{pair.proxy.cpu_us / 1e3:.3f}", f"{pair.bare.cpu_us / 1e3:.3f}", f"{pair.ratio:.1f}"]
        quantiles = [f"{pair.proxy.quantile_ms(share):.1f}" for share in (0.5, 0.99)]
        table.add_row(name, *times, str(GOALS[name]), f"{pair.proxy.rate:.0f}", *quantiles, f"{pair.bare.rate:.0f}")
    console.print(table)


def machine() -> str:
    """Return the processor, the cores and the versions that a figure depends on."""
    model = "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


@contextmanager
def remote_proxy(folder: Path, tokenizer: Path | None) -> Iterator[tuple[Server, Server]]:
    """Run a proxy in front of a simulated engine server; yield both."""
    allow_open_files()
    with (
        upstream_server(folder, word_tokens(model_of(tokenizer))) as upstream,
        proxy_server(folder, tokenizer, upstream.url) as proxy,
    ):
        yield proxy, upstream


@contextmanager
def servers(tokenizer: Path | None) -> Iterator[tuple[Server, Server, Server]]:
    """Run a proxy in front of an engine server, one with the scripted engine, and the bare handler; load on core 1."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        remote, _ = stack.enter_context(remote_proxy(folder, tokenizer))
        second = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scripted = stack.enter_context(proxy_server(second, tokenizer))
        reply = folder / "reply.json"
        reply.write_bytes(uvloop.run(one_reply(remote)))
        bare = stack.enter_context(bare_server(folder, reply))
        stack.enter_context(on_core(1))
        yield remote, scripted, bare


def run(plan: Plan, seed: int, tokenizer: Path | None) -> Results:
    with servers(tokenizer) as (remote, scripted, bare):
        bench = Bench(remote, scripted, bare, plan, Words(seed))
        uvloop.run(bench.run())
        return bench.results


async def one_reply(proxy: Server) -> bytes:
    """Return a reply for the bare handler to give."""
    connection = await connect(proxy)
    reply = await connection.post(new_path(), Conversation(Words(0)).next_body())
    connection.close()
    return reply


def assets_tokenizer() -> Path | None:
    """Return the folder of a real tokenizer if the test assets are present, else None for the built-in one."""
    folder = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", "../shared")) / "tokenizers" / "qwen3"
    return folder if folder.is_dir() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[32], help="requests at once, e.g. 32 256 1024")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--seed", type=int, default=0, help="of the text; same seed, same text")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    name = options.tokenizer.name if options.tokenizer else "built in"
    console.print(f"{machine()}, tokenizer {name}\n", highlight=False)
    for in_flight in options.in_flight:
        plan = Plan(in_flight, 160, 1) if options.quick else Plan(in_flight)
        report(run(plan, options.seed, options.tokenizer), plan, console)


if __name__ == "__main__":
    main()
