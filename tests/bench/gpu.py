"""The overhead of the proxy on a real engine: many concurrent sessions through it and directly, in one run.

The server runs as in production: `proxy.serving.server` with the engine in its process, a SQLite file, and agents in
processes of their own. The direct arms run in the same process, between the others; the prefix cache is flushed
before each arm. Weights are random, and nothing is downloaded. No figure fails the bench. Run
`python -m tests.bench.gpu` from the root of the repository on a machine with CUDA and sglang;
`--device cpu` shows on any machine that the bench works."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from starlette.applications import Starlette

from proxy.engine.interface import Engine
from proxy.rendering.renderer import Renderer
from proxy.serving.server import run
from proxy.settings import Settings
from tests.bench.clients import Clients
from tests.bench.direct import prepare, run_direct
from tests.bench.models import SIZES, write_model
from tests.bench.rollouts import Arm, Reply, Workload, first_token_ms, hit_rates, tokens_a_second
from tests.engines.devices import CPU_DEVICE
from tokengrove.errors import ConfigurationError

_WARM_UP = 16
"""Sessions of two turns per way that warm up the server and are not counted. Before them, as many as are measured run
two turns on the engine: it compiles kernels for the sizes of their batches, which takes seconds."""

_MODES = {"streamed": True, "whole replies": False}
_WAYS = ("direct", "proxy")


@dataclass(frozen=True, slots=True)
class Plan:
    """The workload and its repetitions. `clients`: the number of processes of agents."""

    workload: Workload
    rounds: int
    clients: int


@dataclass(slots=True)
class Results:
    """The replies of every round, by mode and way."""

    engine: str
    machine: str = ""
    cache_gib: float = 0.0
    rounds: dict[tuple[str, str], list[list[Reply]]] = field(default_factory=dict)

    def rate(self, mode: str, way: str) -> float:
        """Return tokens per second, the median of the rounds."""
        return statistics.median(tokens_a_second(replies) for replies in self.rounds[mode, way])

    def pooled(self, mode: str, way: str) -> list[Reply]:
        """Return the replies of all rounds; sessions of different rounds get different numbers."""
        rounds = enumerate(self.rounds[mode, way])
        return [_renumbered(reply, number) for number, replies in rounds for reply in replies]


def _renumbered(reply: Reply, number: int) -> Reply:
    session, *rest = reply.to_row()
    return Reply(number * 1_000_000 + session, *rest)


class Bench:
    """Runs the arms on one server with its engine."""

    def __init__(self, plan: Plan, engine: Engine, renderer: Renderer, clients: Clients) -> None:
        self._plan = plan
        self._engine = engine
        self._renderer = renderer
        self._clients = clients

    async def measure(self) -> Results:
        """Run all rounds of all arms; the order of the two ways alternates from round to round."""
        results, workload = Results(engine=self._engine.info().detail), self._plan.workload
        await self._run("direct", replace(workload, turns=2), Arm("warm-engine", False, 0))
        warming = Workload(min(_WARM_UP, workload.sessions), 2, workload.reply_tokens, 400, 100)
        for way in _WAYS:
            for stream in _MODES.values():
                await self._run(way, warming, Arm(f"warm-{way}-{stream:d}", stream, 0))
        for number in range(1, self._plan.rounds + 1):
            for mode, stream in _MODES.items():
                for way in _WAYS if number % 2 else _WAYS[::-1]:
                    arm = Arm(f"{way}-{stream:d}-{number}", stream, number)
                    results.rounds.setdefault((mode, way), []).append(await self._run(way, workload, arm))
        return results

    async def _run(self, way: str, workload: Workload, arm: Arm) -> list[Reply]:
        """Run one arm, starting with an empty prefix cache."""
        if way == "proxy":
            await self._engine.flush_cache()
            return await self._clients.run(workload, arm)
        sessions = await asyncio.to_thread(prepare, self._renderer, workload, arm)
        await self._engine.flush_cache()
        return await run_direct(self._engine, sessions, workload, arm, self._renderer.stop_token_ids)


def serve_and_measure(settings: Settings, plan: Plan) -> Results:
    """Start the server, measure, and stop it. Raises the first error of any of these."""
    running: list[asyncio.Task[Results]] = []

    def on_ready(app: Starlette, url: str) -> None:
        task = asyncio.get_running_loop().create_task(_measure(app, int(url.rpartition(":")[2]), plan))
        task.add_done_callback(lambda _: signal.raise_signal(signal.SIGTERM))
        running.append(task)

    run(settings, on_ready)
    return running[0].result()


async def _measure(app: Starlette, port: int, plan: Plan) -> Results:
    clients = Clients(port, plan.clients)
    await clients.start()
    try:
        return await Bench(plan, app.state.engine, app.state.renderer, clients).measure()
    finally:
        await clients.close()


def final_tokens(results: Results) -> int:
    """Return the number of tokens of all sessions of an arm at their end."""
    replies = results.rounds[next(iter(_MODES)), "proxy"][0]
    last = max(reply.turn for reply in replies)
    return sum(reply.prompt_tokens + reply.reply_tokens for reply in replies if reply.turn == last)


def report(results: Results, plan: Plan, console: Console) -> None:
    load = plan.workload
    console.print(f"\n{results.machine}; {results.engine}", highlight=False)
    console.print(
        f"{load.sessions} sessions at once, {load.turns} turns each, up to {load.reply_tokens} tokens a reply; "
        f"{plan.rounds} rounds, {plan.clients} processes of clients",
        highlight=False,
    )
    console.print(f"keys and values of all sessions at their end: {results.cache_gib:.1f} GiB\n", highlight=False)
    console.print(_rates(results))
    for mode in _MODES:
        ratio = results.rate(mode, "proxy") / results.rate(mode, "direct")
        console.print(f"{mode}: proxy / direct = {ratio:.3f} of the tokens per second", highlight=False)


def _rates(results: Results) -> Table:
    table = Table(title="Prefix cache and time to first token: turns from the second on", title_justify="left")
    table.add_column("replies")
    table.add_column("way")
    for column in ("tokens/s", "first token p50 ms", "p99 ms", "prompt tokens", "cached", "of what was there"):
        table.add_column(column, justify="right")
    for mode in _MODES:
        for way in _WAYS:
            replies = results.pooled(mode, way)
            prompts = statistics.mean(reply.prompt_tokens for reply in replies if reply.turn)
            waits = [first_token_ms(replies, share) for share in (0.5, 0.99)]
            cells = ["-" if wait is None else f"{wait:.1f}" for wait in waits]
            shares = [f"{rate:.3f}" for rate in hit_rates(replies)]
            table.add_row(mode, way, f"{results.rate(mode, way):.0f}", *cells, f"{prompts:.0f}", *shares)
    return table


def check_possible(engine: str, device: str) -> None:
    """Raise SystemExit with the reason when the bench cannot run here."""
    for package in ("torch", engine):
        if importlib.util.find_spec(package) is None:
            raise SystemExit(f"this bench needs the package {package}; --engine transformers works without sglang")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("no CUDA GPU is here (torch.cuda.is_available() is False); --device cpu runs without one")


def machine(device: str) -> str:
    """The GPU by name, or the CPU."""
    if device == "cpu":
        model = next(iter(_lines_of("/proc/cpuinfo", "model name")), "unknown CPU")
        return f"{model}, {os.cpu_count()} cores, no GPU: these figures do not apply to a GPU"
    import torch

    return f"{torch.cuda.get_device_name(0)}, {os.cpu_count()} CPU cores"


def _lines_of(path: str, name: str) -> list[str]:
    lines = Path(path).read_text().splitlines() if Path(path).exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def engine_arguments(engine: str, device: str, given: Sequence[str], load: Workload) -> tuple[str, ...]:
    """Return the engine arguments of the server; given ones win. On a GPU the engine chooses all sizes itself."""
    if engine == "transformers":
        return (f"device={device}", *given)
    cpu = (*CPU_DEVICE, f"max_total_tokens={load.most_tokens}", f"max_running_requests={load.sessions}")
    return ("load_format=dummy", *(cpu if device == "cpu" else ()), *given)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--engine", choices=("sglang", "transformers"), default="sglang")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model-size", choices=SIZES, default="0.6b", help="of the random model")
    parser.add_argument("--sessions", type=int, default=128, help="conversations at once")
    parser.add_argument("--turns", type=int, default=6, help="replies a session, at least 2")
    parser.add_argument("--reply-tokens", type=int, default=200, help="most tokens of a reply")
    parser.add_argument("--first-characters", type=int, default=2000, help="of the first user message")
    parser.add_argument("--later-characters", type=int, default=100, help="of each later one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="processes")
    parser.add_argument(
        "--engine-arg", action="append", default=[], metavar="KEY=VALUE", help="as of `tokengrove serve`, for example "
        "attention_backend=fa3 or sampling_backend=flashinfer; several times",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.turns < 2 or options.sessions < 1 or options.rounds < 1:
        parser.error("--turns is at least 2, --sessions and --rounds at least 1")
    return options


def main() -> None:
    options: Any = parse()
    check_possible(options.engine, options.device)
    sizes = (options.sessions, options.turns, options.reply_tokens, options.first_characters, options.later_characters)
    plan = Plan(Workload(*sizes), options.rounds, options.clients)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dtype = "float32" if options.device == "cpu" else "bfloat16"
        write_model(folder / "model", SIZES[options.model_size], dtype, weights=options.engine == "transformers")
        settings = Settings(
            port=0, model=str(folder / "model"), engine=options.engine, log_level="warning",
            engine_arg=engine_arguments(options.engine, options.device, options.engine_arg, plan.workload),
            database_url=f"sqlite:///{folder / 'bench.db'}",
        )  # fmt: skip
        try:
            results = serve_and_measure(settings, plan)
        except ConfigurationError as error:
            raise SystemExit(f"the server does not start: {error}") from None
        except asyncio.CancelledError:
            raise SystemExit("a signal ended the benchmark before its last arm") from None
    results.machine = f"{machine(options.device)}; random {options.model_size} model"
    results.cache_gib = (
        SIZES[options.model_size].cache_bytes(final_tokens(results), 4 if dtype == "float32" else 2) / 2**30
    )
    report(results, plan, Console(width=max(120, Console().width)))


if __name__ == "__main__":
    main()
