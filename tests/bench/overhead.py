"""The overhead of the proxy: requests per second and latencies beside a bare handler of the same JSON, in one run.

The engine is scripted, so all time is the proxy's. Server and load each run on one core where there are two. No figure
fails the bench. Run `python -m tests.bench.overhead [--quick]` from the root of the repository."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.load import (
    SYSTEM_CHARACTERS,
    USER_CHARACTERS,
    Connection,
    Conversation,
    Sent,
    Series,
    Words,
    connect,
    conversing,
    new_path,
    sending,
    under_load,
)
from tests.bench.servers import REPLY_TOKENS, Server, bare_server, on_core, proxy_server

TURN_TOKENS = 800
LAST_TURN = 60
SHOWN_TURNS = (3, 20, 40, 60)
FRESH, REPEATED, GROWING = "first turn, fresh text", "first turn, repeated text", f"turns 2 to {LAST_TURN}"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure. Each phase ends at its count or after `phase_s` seconds, whichever comes first."""

    rounds: int = 7
    first_turns: int = 600
    connections: int = 16
    growing_sessions: int = 4
    serial_sessions: int = 21
    phase_s: float = 4.0


QUICK = Plan(rounds=2, first_turns=100, growing_sessions=2, serial_sessions=3, phase_s=2.0)


@dataclass(slots=True)
class Turns:
    """By turn number, one request at a time: latency and CPU time of the server in ns, and bytes of the body."""

    latency_ns: dict[int, list[int]] = field(default_factory=dict)
    cpu_ns: dict[int, list[int]] = field(default_factory=dict)
    body_bytes: dict[int, int] = field(default_factory=dict)
    prompt_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, turn: int, latency_ns: int, cpu_ns: int, body: bytes) -> None:
        self.latency_ns.setdefault(turn, []).append(latency_ns)
        self.cpu_ns.setdefault(turn, []).append(cpu_ns)
        self.body_bytes[turn] = len(body)


async def by_turn(server: Server, conversation: Conversation, turns: Turns, bare: Server, bare_turns: Turns) -> None:
    """Run one conversation alone; each body is also sent to the bare handler, right afterwards."""
    connection, bare_connection = await connect(server), await connect(bare)
    for turn in range(1, LAST_TURN + 1):
        body = conversation.next_body()
        answer = await _timed(server, connection, turn, conversation.path, body, turns)
        await _timed(bare, bare_connection, turn, conversation.path, body, bare_turns)
        turns.prompt_tokens[turn] = orjson.loads(answer)["usage"]["prompt_tokens"]
        conversation.take(answer)
    connection.close()
    bare_connection.close()


async def _timed(server: Server, connection: Connection, turn: int, path: str, body: bytes, turns: Turns) -> bytes:
    cpu_ns, begun = server.cpu_ns(), time.perf_counter_ns()
    answer = await connection.post(path, body)
    latency_ns = time.perf_counter_ns() - begun
    turns.add(turn, latency_ns, server.cpu_ns() - cpu_ns, body)
    return answer


@dataclass(slots=True)
class Results:
    proxy: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in (FRESH, REPEATED, GROWING)})
    bare: dict[str, Series] = field(default_factory=lambda: {name: Series() for name in (FRESH, REPEATED, GROWING)})
    proxy_turns: Turns = field(default_factory=Turns)
    bare_turns: Turns = field(default_factory=Turns)


async def measure(proxy: Server, bare: Server, plan: Plan, seed: int) -> Results:
    """Run rounds of all phases, alternating proxy and bare handler, so that a slow moment affects both."""
    results = Results()
    words = Words(seed)
    user_characters = await _calibrate(proxy, words)
    for turn_round in range(plan.rounds):
        await _first_turns(proxy, bare, plan, words, results)
        await _growing(proxy, bare, plan, words, user_characters, results)
        for _ in range(_share(plan.serial_sessions, plan.rounds, turn_round)):
            conversation = Conversation(words, user_characters, LAST_TURN)
            await by_turn(proxy, conversation, results.proxy_turns, bare, results.bare_turns)
    return results


def _share(total: int, rounds: int, index: int) -> int:
    return total // rounds + (index < total % rounds)


async def _calibrate(proxy: Server, words: Words) -> int:
    """Return the characters that a user message needs for a turn of `TURN_TOKENS` with its reply. Also warms up."""
    connection = await connect(proxy)
    for _ in range(20):
        conversation = Conversation(words)
        answer = await connection.post(conversation.path, conversation.next_body())
    connection.close()
    characters_a_token = (SYSTEM_CHARACTERS + USER_CHARACTERS) / orjson.loads(answer)["usage"]["prompt_tokens"]
    return int((TURN_TOKENS - REPLY_TOKENS) * characters_a_token)


async def _first_turns(proxy: Server, bare: Server, plan: Plan, words: Words, results: Results) -> None:
    def fresh() -> tuple[str, bytes]:
        conversation = Conversation(words)
        return conversation.path, conversation.next_body()

    requests = [fresh() for _ in range(plan.first_turns)]
    repeated = [(new_path(), requests[0][1]) for _ in requests]
    for name, sent in ((FRESH, requests), (REPEATED, repeated)):
        works = [sending(sent[lane :: plan.connections]) for lane in range(plan.connections)]
        await under_load(bare, works, results.bare[name], plan.phase_s)
        await under_load(proxy, works, results.proxy[name], plan.phase_s)


async def _growing(
    proxy: Server, bare: Server, plan: Plan, words: Words, user_characters: int, results: Results
) -> None:
    conversations = [Conversation(words, user_characters, LAST_TURN) for _ in range(plan.growing_sessions)]
    sent: list[Sent] = [[] for _ in conversations]
    firsts = [conversing(conversation, 1, []) for conversation in conversations]
    await under_load(proxy, firsts, Series(), plan.phase_s)
    works = [conversing(chat, LAST_TURN - 1, kept) for chat, kept in zip(conversations, sent, strict=True)]
    await under_load(proxy, works, results.proxy[GROWING], plan.phase_s)
    await under_load(bare, [sending(kept) for kept in sent], results.bare[GROWING], plan.phase_s)


def report(results: Results, console: Console) -> None:
    console.print(f"\n{_machine()}\n", highlight=False)
    console.print(_rates(results))
    console.print(_costs(results))
    for label, column in (("latency", "latency_ns"), ("CPU time", "cpu_ns")):
        console.print(f"{label} by byte of body, beyond the bare handler: {_ns_a_byte(results, column):.1f} ns")


def _machine() -> str:
    model = "unknown CPU"
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.system()}"


def _rates(results: Results) -> Table:
    table = Table(title=f"Under load; replies of {REPLY_TOKENS} tokens at once", title_justify="left")
    table.add_column("request")
    for column in ("proxy req/s", "p50 ms", "p99 ms", "bare req/s", "p50 ms", "p99 ms", "bare / proxy"):
        table.add_column(column, justify="right")
    for name, proxy in results.proxy.items():
        bare = results.bare[name]
        cells = [f"{proxy.rate:.0f}", *_quantiles(proxy), f"{bare.rate:.0f}", *_quantiles(bare)]
        table.add_row(name, *cells, f"{bare.rate / proxy.rate:.1f}")
    return table


def _quantiles(series: Series) -> list[str]:
    return [f"{series.quantile_ms(share):.2f}" for share in (0.5, 0.99)]


def _costs(results: Results) -> Table:
    table = Table(title="One request at a time, p50", title_justify="left")
    for column in ("turn", "prompt tokens", "body kB", "proxy ms", "proxy CPU ms", "bare ms", "bare CPU ms"):
        table.add_column(column, justify="right")
    proxy, bare = results.proxy_turns, results.bare_turns
    for turn in SHOWN_TURNS:
        columns = (proxy.latency_ns, proxy.cpu_ns, bare.latency_ns, bare.cpu_ns)
        times = [f"{_p50(column, turn) / 1e6:.3f}" for column in columns]
        table.add_row(str(turn), str(proxy.prompt_tokens[turn]), f"{proxy.body_bytes[turn] / 1e3:.1f}", *times)
    return table


def _p50(values: dict[int, list[int]], turn: int) -> float:
    """Return the median of this turn and its neighbours, which differ by one message, over all sessions."""
    return statistics.median(value for near in (turn - 1, turn, turn + 1) for value in values.get(near, []))


def _ns_a_byte(results: Results, column: str) -> float:
    """(growth of the proxy from the first shown turn to the last - growth of the bare handler) / growth of the body."""
    first, last = SHOWN_TURNS[0], SHOWN_TURNS[-1]
    both = [getattr(turns, column) for turns in (results.proxy_turns, results.bare_turns)]
    proxy, bare = (_p50(values, last) - _p50(values, first) for values in both)
    sizes = results.proxy_turns.body_bytes
    return (proxy - bare) / (sizes[last] - sizes[first])


def run(plan: Plan, seed: int, tokenizer: Path | None) -> Results:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        proxy = stack.enter_context(proxy_server(folder, tokenizer))
        reply = folder / "reply.json"
        reply.write_bytes(uvloop.run(_one_reply(proxy)))
        bare = stack.enter_context(bare_server(folder, reply))
        stack.enter_context(on_core(1))
        return uvloop.run(measure(proxy, bare, plan, seed))


async def _one_reply(proxy: Server) -> bytes:
    connection, conversation = await connect(proxy), Conversation(Words(0))
    reply = await connection.post(conversation.path, conversation.next_body())
    connection.close()
    return reply


def assets_tokenizer() -> Path | None:
    """Return the folder of a real tokenizer if the test assets are present, else None for the built-in one."""
    folder = Path(os.environ.get("TOKENGROVE_TEST_ASSETS", "../shared")) / "tokenizers" / "qwen3"
    return folder if folder.is_dir() else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of about a minute")
    parser.add_argument("--seed", type=int, default=0, help="of the text; same seed, same text")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(110, Console().width))
    console.print(f"tokenizer: {options.tokenizer.name if options.tokenizer else 'built in'}")
    report(run(QUICK if options.quick else Plan(), options.seed, options.tokenizer), console)


if __name__ == "__main__":
    main()
