"""The cost of turn 100 of a session of 100,000 tokens beside that of turn 5, one request at a time.

Cost is CPU time of the server. What a longer body costs any server is measured by the bare handler, which parses the
same bodies, and is taken off. Through an engine server the prompt's ids are sent as JSON, so a second session runs on
the scripted engine, which needs no such body. Run `python -m tests.bench.depth` from the root of the repository. No
figure fails the bench."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.load import Connection, Conversation, Words, connect
from tests.bench.overhead import assets_tokenizer, machine, servers
from tests.bench.servers import REPLY_TOKENS, Server

EARLY, LATE = 5, 100
NEAR = 3
"""Turns on each side that count as the same depth: they differ by little, and a median needs more than one."""

TURN_TOKENS = 1000
SESSIONS = 3
GOAL = 1.3


@dataclass(slots=True)
class Costs:
    """By turn number, over all sessions: CPU time of the server and latency in ns."""

    cpu: dict[int, list[int]] = field(default_factory=dict)
    wall: dict[int, list[int]] = field(default_factory=dict)

    def add(self, turn: int, cpu_ns: int, wall_ns: int) -> None:
        self.cpu.setdefault(turn, []).append(cpu_ns)
        self.wall.setdefault(turn, []).append(wall_ns)


def near_ms(values: dict[int, list[int]], turn: int) -> float:
    """Return the median of a turn and its neighbours."""
    near = range(turn - NEAR, turn + NEAR + 1)
    return statistics.median(value for one in near for value in values[one]) / 1e6


@dataclass(slots=True)
class Depth:
    """The figures of one engine."""

    proxy: Costs = field(default_factory=Costs)
    bare: Costs = field(default_factory=Costs)
    prompt_tokens: dict[int, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """The late turn, less what its longer body costs the bare handler, to the early turn."""
        parsing = near_ms(self.bare.cpu, LATE) - near_ms(self.bare.cpu, EARLY)
        return (near_ms(self.proxy.cpu, LATE) - parsing) / near_ms(self.proxy.cpu, EARLY)


async def measure(proxy: Server, bare: Server, words: Words, characters: int) -> Depth:
    depth = Depth()
    for _ in range(SESSIONS):
        conversation = Conversation(words, characters, LATE + NEAR)
        connection, other = await connect(proxy), await connect(bare)
        for turn in range(1, LATE + NEAR + 1):
            body = conversation.next_body()
            answer = await _timed(proxy, connection, conversation.path, body, depth.proxy, turn)
            await _timed(bare, other, conversation.path, body, depth.bare, turn)
            depth.prompt_tokens[turn] = orjson.loads(answer)["usage"]["prompt_tokens"]
            conversation.take(answer)
        connection.close()
        other.close()
    return depth


async def _timed(server: Server, connection: Connection, path: str, body: bytes, costs: Costs, turn: int) -> bytes:
    cpu_ns, begun = server.cpu_ns(), time.perf_counter_ns()
    answer = await connection.post(path, body)
    wall_ns = time.perf_counter_ns() - begun
    costs.add(turn, server.cpu_ns() - cpu_ns, wall_ns)
    return answer


def report(results: dict[str, Depth], console: Console) -> None:
    table = Table(title="One request at a time, medians", title_justify="left")
    table.add_column("engine")
    for column in ("turn", "prompt tokens", "CPU ms", "bare CPU ms", "ms", "ratio", "goal"):
        table.add_column(column, justify="right")
    for name, depth in results.items():
        for turn in (EARLY, LATE):
            times = (depth.proxy.cpu, depth.bare.cpu, depth.proxy.wall)
            ratio = [f"{depth.ratio:.2f}", f"{GOAL:g}"] if turn == LATE else ["", ""]
            figures = [f"{near_ms(values, turn):.2f}" for values in times]
            table.add_row(name, str(turn), str(depth.prompt_tokens[turn]), *figures, *ratio)
    console.print(table)


def run(tokenizer: Path | None, characters: int) -> dict[str, Depth]:
    with servers(tokenizer) as (remote, scripted, bare):
        engines = {"engine server": remote, "scripted": scripted}
        return {name: uvloop.run(measure(proxy, bare, Words(0), characters)) for name, proxy in engines.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    parser.add_argument(
        "--characters", type=int, default=int((TURN_TOKENS - REPLY_TOKENS) * 3.45), help="of a user message"
    )
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    name = options.tokenizer.name if options.tokenizer else "built in"
    console.print(f"{machine()}, tokenizer {name}\n", highlight=False)
    report(run(options.tokenizer, options.characters), console)


if __name__ == "__main__":
    main()
