"""What operations cost on databases that grew: a server and the commands of `tokengrove db`, by the number of turns.

Each database is written anew (`tests.bench.grown_database`), in groups of 8 sessions of 10 turns. Beside the time of an
operation there is the work of the database, which other load does not change: with SQLite the pages of 4 kB that the
process read, with PostgreSQL the blocks that the server looked at. One database at a time exists.

Run `python -m tests.bench.grown [300000 1000000] [--postgres]` from the root of the repository. No figure fails the
bench."""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from tests.bench.grown_database import GROUP, OPEN_EACH, TURNS, grow
from tests.bench.overhead import machine
from tests.bench.servers import Server, free_port, server_process
from tests.conftest import Postgres
from tests.databases import execute

REPEATS = 20
PAGE_BYTES = 4096
_BLOCKS = "SELECT blks_hit + blks_read FROM pg_stat_database WHERE datname = current_database()"


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one operation: its median time in ms, the CPU time of our process in ms, and the pages that were read."""

    ms: float
    cpu_ms: float = 0.0
    pages: float = 0.0


@dataclass(slots=True)
class Grown:
    """The figures of one database. `size_mb`: on disk. `grow_s`: how long it took to write."""

    turns: int
    size_mb: float = 0.0
    grow_s: float = 0.0
    costs: dict[str, Cost] = field(default_factory=dict)


class Meter:
    """Measures operations against a database, in a server or in commands."""

    def __init__(self, url: str, grown: Grown) -> None:
        self._url, self._grown = url, grown
        self.server: Server | None = None

    def each(self, name: str, work: Callable[[int], Any], repeats: int = REPEATS) -> None:
        """Run `work` several times, after once to warm up."""
        work(0)
        assert self.server is not None
        pages, cpu_ns, times = self._pages(), self.server.cpu_ns(), list[float]()
        for number in range(1, repeats + 1):
            begun = time.perf_counter()
            work(number)
            times.append((time.perf_counter() - begun) * 1e3)
        cpu_ms = (self.server.cpu_ns() - cpu_ns) / repeats / 1e6
        self._grown.costs[name] = Cost(statistics.median(times), cpu_ms, (self._pages() - pages) / repeats)

    def command(self, name: str, *arguments: str) -> None:
        """Run a command of tokengrove on the database, once."""
        pages, begun, cpu_s = self._pages(), time.perf_counter(), _cpu_of_commands_s()
        command(*arguments, "--database-url", self._url)
        ms, cpu_ms = (time.perf_counter() - begun) * 1e3, (_cpu_of_commands_s() - cpu_s) * 1e3
        self._grown.costs[name] = Cost(ms, cpu_ms, self._pages() - pages)

    def _pages(self) -> float:
        if self._url.startswith("postgres"):
            execute(self._url, "SELECT pg_stat_force_next_flush()")
            return float(execute(self._url, _BLOCKS)[0][0])
        if self.server is None:
            return 0.0
        read = Path(f"/proc/{self.server.pid}/io").read_text().partition("rchar: ")[2].split()[0]
        return int(read) / PAGE_BYTES


class Operations:
    """The requests of agents, trainers and the page."""

    def __init__(self, client: httpx.Client, turns: int) -> None:
        self._client = client
        self._groups = turns // (GROUP * TURNS)

    def measure(self, meter: Meter) -> None:
        meter.each("start of a session", self.start)
        meter.each("first turn", lambda number: self.turn(f"new-{number}"))
        meter.each("turn of a stored session", lambda number: self.turn(f"{self._open(number)}g-3"))
        meter.each("claim of a group", lambda number: self._post("/trajectories/claim", {"limit": GROUP}))
        meter.each("export of a group", lambda number: self._export({"group_id": f"{self._old(number)}g"}))
        meter.each("tree of a session", lambda number: self._get(f"/rl/sessions/{self._old(number)}g-5"))
        meter.each("listing of 100", lambda number: self._list(limit=100, order="newest"))
        meter.each("listing in the middle", lambda number: self._list(limit=100, cursor=f"{self._old(number)}g-1"))
        meter.each("sessions of the page", lambda number: self._list(limit=50, order="newest", include="summary"))
        meter.each("counts of the page", lambda number: self._list(limit=1, include="counts"))
        meter.each("groups of the page", lambda number: self._get("/rl/groups?limit=50"))
        meter.each("statistics of the page", lambda number: self._get("/rl/statistics"))
        meter.each("search of the page", lambda number: self._list(limit=50, filter='{"search": "nothing"}'), 3)

    def start(self, number: int) -> None:
        self._post("/rl/start_session", {"task_id": "new", "group_id": f"new-{number // GROUP}"})

    def turn(self, session: str) -> None:
        messages = [{"role": "user", "content": "And now?"}]
        self._post(f"/{session}/v1/chat/completions", {"model": "m", "max_tokens": 16, "messages": messages})

    def _export(self, wanted: dict[str, str]) -> None:
        body = {"filter": wanted, "layout": "concat", "format": "npz"}
        answer = self._client.post("/trajectories/export", json=body)
        answer.raise_for_status()

    def _open(self, number: int) -> int:
        """A group with open sessions."""
        return OPEN_EACH * (1 + (self._groups // 3 // OPEN_EACH + number) % ((self._groups - 1) // OPEN_EACH))

    def _old(self, number: int) -> int:
        """A group somewhere in the middle: another one for each number."""
        return self._groups // 3 + 7 * number

    def _list(self, **query: Any) -> None:
        answer = self._client.get("/rl/sessions", params=query)
        answer.raise_for_status()

    def _get(self, path: str) -> None:
        self._client.get(path).raise_for_status()

    def _post(self, path: str, body: Any) -> None:
        answer = self._client.post(path, json=body)
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.text}")


@contextmanager
def server_of(url: str, folder: Path) -> Iterator[Server]:
    port = free_port()
    arguments = ["-m", "tokengrove", "serve", "--port", str(port), "--database-url", url, "--engine", "scripted"]
    with server_process([*arguments, "--engine-arg", "tokens=16"], port, folder, core=None) as server:
        yield server


def command(*arguments: str) -> None:
    """Run a command of tokengrove. Raises SystemExit with its output if it fails."""
    done = subprocess.run([sys.executable, "-m", "tokengrove", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"tokengrove {' '.join(arguments)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def measure(url: str, turns: int, folder: Path, most_for_commands: int) -> Grown:
    grown = Grown(turns)
    meter = Meter(url, grown)
    begun = time.perf_counter()
    grow(url, turns)
    grown.grow_s = time.perf_counter() - begun
    grown.size_mb = _size(url) / 1e6
    with ExitStack() as stack:
        begun = time.perf_counter()
        server = stack.enter_context(server_of(url, folder))
        grown.costs["start of the server"] = Cost((time.perf_counter() - begun) * 1e3, server.cpu_ns() / 1e6)
        meter.server = server
        client = stack.enter_context(httpx.Client(base_url=server.url, timeout=600.0))
        Operations(client, turns).measure(meter)
    meter.server = None
    meter.command("prune, nothing old", "db", "prune", "--older-than", "900d")
    if turns <= most_for_commands:
        backup = folder / "backup.jsonl.zst"
        meter.command("db check", "db", "check")
        meter.command("backup", "export", "--all", "-o", str(backup))
        grown.costs["size of the backup, MB"] = Cost(backup.stat().st_size / 1e6)
        backup.unlink()
        meter.command("prune of all that was exported", "db", "prune", "--older-than", "0s")
    return grown


def _cpu_of_commands_s() -> float:
    spent = os.times()
    return spent.children_user + spent.children_system


def _size(url: str) -> int:
    if url.startswith("sqlite"):
        return Path(url.removeprefix("sqlite:///")).stat().st_size
    return int(execute(url, "SELECT pg_database_size(current_database())")[0][0])


def run(counts: list[int], most_for_commands: int, postgres: bool, folder: Path) -> Iterator[Grown]:
    with ExitStack() as stack:
        server = Postgres(folder / "postgres") if postgres else None
        if server is not None:
            stack.callback(server.close)
        for turns in counts:
            with ExitStack() as one:
                name = one.enter_context(tempfile.TemporaryDirectory(dir=folder))
                url = f"sqlite:///{name}/grown.db" if server is None else one.enter_context(server.database())
                yield measure(url, turns, Path(name), most_for_commands)


def report(found: list[Grown], console: Console) -> None:
    table = Table(title="Operations by the turns in the database: ms, ms of CPU, pages read", title_justify="left")
    table.add_column("operation")
    for each in found:
        table.add_column(f"{each.turns:,} turns", justify="right")
    table.add_row("size of the database, MB", *(f"{each.size_mb:,.0f}" for each in found))
    for name in max((each.costs for each in found), key=len):
        costs = (each.costs.get(name) for each in found)
        table.add_row(name, *(f"{one.ms:,.1f}, {one.cpu_ms:,.1f}, {one.pages:,.0f}" if one else "" for one in costs))
    table.add_row("written in, s", *(f"{each.grow_s:.0f}" for each in found))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("turns", type=int, nargs="*", default=[300_000, 1_000_000])
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL instead of SQLite")
    parser.add_argument(
        "--commands",
        type=int,
        default=300_000,
        help="most turns with which commands that read all of them run (300000)",
    )
    options = parser.parse_args()
    console = Console(width=140)
    console.print(machine())
    found: list[Grown] = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        for each in run(options.turns, options.commands, options.postgres, Path(name).resolve()):
            found.append(each)
            report(found, console)


if __name__ == "__main__":
    main()
