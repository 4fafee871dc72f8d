"""What episodes cost where they are played, and at the server: CPU and memory by executor and kind of agent.

Each run plays so many episodes at once through an executor, against a server in front of a simulated engine server that
answers at once. Agents wait before each turn, as for a tool, so that all episodes of a run are live at one time: then
memory is read (PSS, in which pages that processes share are divided). Two runs with few and many turns tell what an
episode costs from what a turn costs. CPU time is read, not the clock, so the bench also runs beside other work.

Run `python -m tests.bench.episodes [httpx openai blocking command]` from the root of the repository. `--most 2000`
plays one run of so many episodes at once, and counts how many were live. No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
from rich.console import Console

from tests.bench.episode_runner import Load
from tests.bench.overhead import assets_tokenizer, machine, remote_proxy
from tests.bench.servers import Server
from tests.bench.sizing import memory_mb
from tests.bench.streaming import set_pace
from tests.bench.upstream import Pace
from tokengrove.rollout.executors import ExecutorKind

FEW, MANY = 2, 10
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one run took: CPU in seconds; memory in MB, before and at most; threads, processes and files at most.

    `files` are those of the process with the most of them. `live`: sessions at once, as the server counted them.
    """

    load: Load
    runner_s: float
    proxy_s: float
    idle_mb: float
    peak_mb: float
    proxy_idle_mb: float
    proxy_mb: float
    threads: int
    processes: int
    files: int
    live: int
    failed: int
    seconds: float


class Watch:
    """Reads again and again, in a thread of the bench, what the processes of the runner have."""

    def __init__(self, pid: int, url: str | None) -> None:
        self._process, self._url = psutil.Process(pid), url
        self.peak_mb, self.threads, self.processes, self.files, self.live = 0.0, 0, 0, 0, 0
        self._over = threading.Event()
        self.look()

    def look(self) -> None:
        family = [self._process, *self._process.children(recursive=True)]
        figures = [figure for each in family if (figure := _figures(each)) is not None]
        self.peak_mb = max(self.peak_mb, sum(figure[0] for figure in figures))
        self.threads = max(self.threads, sum(figure[1] for figure in figures))
        self.files = max(self.files, *(figure[2] for figure in figures))
        self.processes = max(self.processes, len(figures))
        if self._url is not None:
            self.live = max(self.live, _live(self._url))

    @contextmanager
    def watching(self) -> Iterator[None]:
        thread = threading.Thread(target=self._go_on)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _go_on(self) -> None:
        while not self._over.wait(LOOK_S):
            self.look()

    def cpu_s(self) -> float:
        """Of all processes of the runner, those that have ended included."""
        family = [self._process, *self._process.children(recursive=True)]
        return sum(sum(each.cpu_times()[:4]) for each in family)


def _figures(process: psutil.Process) -> tuple[float, int, int] | None:
    try:
        return process.memory_full_info().pss / 1e6, process.num_threads(), process.num_fds()
    except psutil.Error:
        return None  # it has ended meanwhile


def _live(url: str) -> int:
    """Sessions that were started and have not ended, by the server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=600) as answer:
        lines = answer.read().decode().splitlines()

    def total(name: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    return int(total("tokengrove_sessions_started_total") - total("tokengrove_sessions_ended_total"))


def measure(load: Load, proxy: Server, upstream: Server, count_live: bool = False) -> Cost:
    asyncio.run(set_pace(upstream, Pace()))
    given = {"load": asdict(load), "url": proxy.url, "name": f"bench-{time.monotonic_ns()}"}
    command = [sys.executable, "-m", "tests.bench.episode_runner"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdin is not None and runner.stdout is not None
        print(json.dumps(given), file=runner.stdin, flush=True)
        runner.stdout.readline()
        watch, proxy_idle_mb = Watch(runner.pid, proxy.url if count_live else None), memory_mb(proxy, "VmRSS")
        idle_mb, runner_before_s, proxy_before_ns = watch.peak_mb, watch.cpu_s(), proxy.cpu_ns()
        begun_s = time.monotonic()
        with watch.watching():
            print("go", file=runner.stdin, flush=True)
            failures = json.loads(runner.stdout.readline())
        seconds, runner_s = time.monotonic() - begun_s, watch.cpu_s() - runner_before_s
        proxy_s = (proxy.cpu_ns() - proxy_before_ns) / 1e9
        print("end", file=runner.stdin, flush=True)
    for failure, times in failures.items():
        print(f"{times} times {failure}", file=sys.stderr)
    return Cost(
        load, runner_s, proxy_s, idle_mb, watch.peak_mb, proxy_idle_mb, memory_mb(proxy, "VmRSS"), watch.threads,
        watch.processes, watch.files, watch.live, sum(failures.values()), seconds,
    )  # fmt: skip


def measured(loads: Sequence[Load], tokenizer: Path | None, count_live: bool = False) -> Iterator[Cost]:
    """The cost of each load, one after the other, at one server."""
    with tempfile.TemporaryDirectory() as folder, remote_proxy(Path(folder), tokenizer) as (proxy, upstream):
        for load in loads:
            yield measure(load, proxy, upstream, count_live)


COLUMNS = (
    *("agent", "executor", "at once", "failed", "runner: ms an episode", "ms a turn", "MB idle", "kB an episode"),
    *("processes", "threads", "files", "server: ms an episode", "ms a turn"),
)


def row_of(few: Cost, many: Cost) -> list[str]:
    """The columns of two runs with few and with many turns."""
    load, grown_mb = many.load, many.peak_mb - many.idle_mb
    runner = _parts(few, many, few.runner_s, many.runner_s)
    proxy = _parts(few, many, few.proxy_s, many.proxy_s)
    return [
        *(load.agent, f"{load.kind} {load.workers or ''}".strip(), str(load.episodes), str(few.failed + many.failed)),
        *(f"{value:.2f}" for value in runner),
        *(f"{many.idle_mb:.0f}", f"{grown_mb / load.episodes * 1e3:.0f}"),
        *map(str, (many.processes, many.threads, many.files)),
        *(f"{value:.2f}" for value in proxy),
    ]


def _parts(few: Cost, many: Cost, few_s: float, many_s: float) -> tuple[float, float]:
    """CPU of an episode without its turns, and of a turn, in ms."""
    turn_ms = (many_s - few_s) / (MANY - FEW) / many.load.episodes * 1e3
    return few_s / few.load.episodes * 1e3 - FEW * turn_ms, turn_ms


def print_table(loads: Sequence[Load], tokenizer: Path | None, console: Console) -> None:
    """A row of Markdown for each pair of loads, as soon as it is measured."""
    console.print("| " + " | ".join(COLUMNS) + " |", highlight=False)
    costs = measured(loads, tokenizer)
    for few in costs:
        console.print("| " + " | ".join(row_of(few, next(costs))) + " |", highlight=False)


def most(load: Load, tokenizer: Path | None, console: Console) -> None:
    for cost in measured([load], tokenizer, count_live=True):
        console.print(f"{load}", highlight=False)
        console.print(
            f"live at once {cost.live}, failed {cost.failed}, {cost.seconds:.0f} s; runner: {cost.runner_s:.1f} s CPU, "
            f"{cost.idle_mb:.0f} -> {cost.peak_mb:.0f} MB, {cost.processes} processes, {cost.threads} threads, "
            f"{cost.files} files; server: {cost.proxy_s:.1f} s CPU, {cost.proxy_idle_mb:.0f} -> {cost.proxy_mb:.0f} MB",
            highlight=False,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("agents", nargs="*", default=["httpx", "openai", "blocking", "command"])
    parser.add_argument("--episodes", type=int, default=100, help="at once")
    parser.add_argument("--wait-s", type=float, default=1.0, help="before each turn")
    parser.add_argument("--workers", type=int, default=2, help="processes of --executor process")
    parser.add_argument("--most", type=int, help="one run of so many at once")
    parser.add_argument("--executor", choices=["local", "process"], help="only this one (default: both)")
    parser.add_argument("--turns", type=int, default=3, help="of --most")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(160, Console().width))
    console.print(machine(), highlight=False)
    kinds: list[ExecutorKind] = [options.executor] if options.executor else ["local", "process"]
    loads = [
        Load(agent, kind, options.workers if kind == "process" else None, options.episodes, turns, options.wait_s)
        for agent in options.agents
        for kind in kinds
        for turns in (FEW, MANY)
    ]
    if options.most:
        for load in loads[::2]:
            most(replace(load, episodes=options.most, turns=options.turns), options.tokenizer, console)
    else:
        print_table(loads, options.tokenizer, console)


if __name__ == "__main__":
    main()
