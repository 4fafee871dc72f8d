"""CPU time of a turn on servers of several workers, on each database, and with features that are off, as ratios.

The engine is a simulated SGLang server that answers at once, in a process of its own. The load alternates between the
servers, on as many connections; every request is a first turn of a session of its own. No process is bound to a core.
The CPU time is that of all processes of the server; PostgreSQL has its own. Workers that share the requests in flight
share fewer commits and queries each, so the ratios fall with their number. Each ratio is the median of the rounds, with
its range. The features are a second declared model and retention; `tests.bench.columns` measures replay columns.

Run `python -m tests.bench.workers [--quick]` from the root of the repository."""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop
from rich.console import Console

from tests.bench.load import Conversation, Series, Words, new_path, sending, under_load
from tests.bench.overhead import PHASE_S, WARM_UP, Plan, assets_tokenizer, machine
from tests.bench.servers import Server, free_port, server_process
from tests.bench.upstream import model_of, upstream_server, word_tokens
from tests.conftest import Postgres

SQLITE, FEATURES, ONE, TWO, FOUR = "SQLite", "SQLite with features", "PostgreSQL", "2 workers", "4 workers"
ON_SQLITE = (SQLITE, FEATURES)
WORKERS = {SQLITE: 1, FEATURES: 1, ONE: 1, TWO: 2, FOUR: 4}
GOALS = {(FEATURES, SQLITE): 1.1, (ONE, SQLITE): 1.15, (TWO, ONE): 1.1, (FOUR, ONE): 1.1}

Rounds = dict[str, list[Series]]


async def measure(servers: dict[str, Server], plan: Plan, words: Words) -> Rounds:
    """Send each round to one server after the other."""
    results: Rounds = {name: [] for name in servers}
    for turns in (WARM_UP * max(WORKERS.values()), *[plan.requests] * plan.rounds):
        for name, server in servers.items():
            requests = [(new_path(), Conversation(words).next_body()) for _ in range(turns)]
            works = [sending(requests[lane :: plan.in_flight]) for lane in range(plan.in_flight)]
            series = Series()
            await under_load(server, works, series, PHASE_S)
            results[name].append(series)
    return {name: rounds[1:] for name, rounds in results.items()}


def run(plan: Plan, tokenizer: Path | None) -> Rounds:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = Postgres()
        stack.callback(postgres.close)
        tokens = word_tokens(model_of(tokenizer))
        upstream, opponent = (stack.enter_context(upstream_server(folder, tokens)) for _ in range(2))
        servers = {}
        for name, workers in WORKERS.items():
            port = free_port()
            file = f"sqlite:///{folder / f'{port}.db'}"
            database = file if name in ON_SQLITE else postgres.create_database(postgres.migrated)
            command = ["-m", "tokengrove", "serve", "--port", str(port), "--workers", str(workers)]
            command += ["--database-url", database, "--engine", upstream.url]
            command += ["--tokenizer", str(tokenizer)] if tokenizer else []
            command += features(folder, opponent) if name == FEATURES else []
            servers[name] = stack.enter_context(server_process(command, port, folder, core=None))
        return uvloop.run(measure(servers, plan, Words(0)))


def features(folder: Path, opponent: Server) -> list[str]:
    """Return options of features that are off unless they are asked for. `opponent`: the engine of a second model."""
    models = {"bench": {}, "opponent": {"kind": "frozen", "engine": opponent.url}}
    return ["--models", json.dumps(models), "--keep-days", "7", "--archive-to", str(folder / "archive")]


def spread(figures: list[float]) -> str:
    return f"{median(figures):.2f} ({min(figures):.2f} to {max(figures):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once")
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="rounds of each server")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    plan = Plan(options.in_flight, 160, 1) if options.quick else Plan(options.in_flight, rounds=options.rounds)
    results = run(plan, options.tokenizer)
    console = Console(width=max(120, Console().width))
    console.print(f"{machine()}, {plan.in_flight} in flight", highlight=False)
    for name, rounds in results.items():
        rate = median(series.rate for series in rounds)
        console.print(f"{name}: {spread([each.cpu_us / 1e3 for each in rounds])} ms CPU a turn, {rate:.0f} turns/s")
    for (name, base), goal in GOALS.items():
        ratios = [one.cpu_us / other.cpu_us for one, other in zip(results[name], results[base], strict=True)]
        console.print(f"{name} to {base}: {spread(ratios)}, goal {goal}")


if __name__ == "__main__":
    main()
