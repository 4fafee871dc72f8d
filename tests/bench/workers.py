"""CPU time of a turn on a server of two workers, as a ratio to a server of one process, on one Postgres.

The engine is a simulated SGLang server that answers at once, in a process of its own. The load alternates between the
two servers, on as many connections; every request is a first turn of a session of its own. No process is bound to a
core. The goal is a ratio of 1.2. Workers that share the requests in flight share fewer commits and queries each, so the
ratio falls with their number.

Run `python -m tests.bench.workers [--quick]` from the root of the repository."""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

import uvloop
from rich.console import Console

from tests.bench.load import Conversation, Series, Words, new_path, sending, under_load
from tests.bench.overhead import PHASE_S, WARM_UP, Plan, assets_tokenizer, machine
from tests.bench.servers import Server, free_port, server_process
from tests.bench.upstream import model_of, upstream_server, word_tokens
from tests.conftest import Postgres

GOAL = 1.2
WORKERS = (1, 2)


async def measure(servers: dict[int, Server], plan: Plan, words: Words) -> dict[int, Series]:
    """Send each round to one server after the other."""
    results = {workers: Series() for workers in servers}
    for turns in (WARM_UP, *[plan.requests] * plan.rounds):
        for workers, server in servers.items():
            requests = [(new_path(), Conversation(words).next_body()) for _ in range(turns)]
            works = [sending(requests[lane :: plan.in_flight]) for lane in range(plan.in_flight)]
            series = Series() if turns == WARM_UP else results[workers]
            await under_load(server, works, series, PHASE_S)
    return results


def run(plan: Plan, tokenizer: Path | None) -> dict[int, Series]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        postgres = Postgres()
        stack.callback(postgres.close)
        upstream = stack.enter_context(upstream_server(folder, word_tokens(model_of(tokenizer))))
        servers = {}
        for workers in WORKERS:
            port = free_port()
            command = ["-m", "tokengrove", "serve", "--port", str(port), "--workers", str(workers)]
            command += ["--database-url", postgres.create_database(postgres.migrated), "--engine", upstream.url]
            command += ["--tokenizer", str(tokenizer)] if tokenizer else []
            servers[workers] = stack.enter_context(server_process(command, port, folder, core=None))
        return uvloop.run(measure(servers, plan, Words(0)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-flight", type=int, default=32, help="requests at once")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    plan = Plan(options.in_flight, 160, 1) if options.quick else Plan(options.in_flight)
    results = run(plan, options.tokenizer)
    console = Console(width=max(120, Console().width))
    console.print(f"{machine()}, {plan.in_flight} in flight", highlight=False)
    for workers, series in results.items():
        console.print(f"workers {workers}: {series.cpu_us / 1e3:.3f} ms CPU a turn, {series.rate:.0f} turns/s")
    one, two = (results[workers].cpu_us for workers in WORKERS)
    console.print(f"ratio {two / one:.2f} (goal {GOAL})")


if __name__ == "__main__":
    main()
