"""CPU and memory of a server by the number of agents at work: what its limits have to allow.

Each agent is a session of several turns that repeats its whole conversation, streamed from a simulated engine server
at a pace of its own. Each count of agents has a new server, so its peak of memory is that of this count, its start
included. The server has one core, the others share the second. With `--cgroup FOLDER` the server joins control groups
that you have made, such as one with a limit of CPU: figures then show what the limit does.

Run `python -m tests.bench.sizing [1 32 128]` from the root of the repository. No figure fails the bench."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.clients import run_sessions
from tests.bench.overhead import assets_tokenizer, machine, remote_proxy
from tests.bench.rollouts import Arm, Workload, first_token_ms
from tests.bench.servers import Server, on_core
from tests.bench.streaming import set_pace
from tests.bench.upstream import Pace

RATE = 30.0
TURNS, REPLY_TOKENS, FIRST_CHARACTERS, LATER_CHARACTERS = 6, 120, 12_000, 3_000


@dataclass(frozen=True, slots=True)
class Size:
    """What one count of agents took. Memory in MB, `cpu_s` in seconds of a core, times to the first token in ms."""

    agents: int
    idle_mb: float
    peak_mb: float
    end_mb: float
    cpu_s: float
    duration_s: float
    tokens: int
    first_ms: tuple[float, float]


def memory_mb(server: Server, name: str) -> float:
    """`VmRSS`, what is resident now, or `VmHWM`, the most that ever was."""
    status = Path(f"/proc/{server.pid}/status").read_text()
    return int(status.partition(f"{name}:")[2].split()[0]) * 1024 / 1e6


async def measure(proxy: Server, upstream: Server, agents: int) -> Size:
    await set_pace(upstream, Pace(rate=RATE))
    workload = Workload(agents, TURNS, REPLY_TOKENS, FIRST_CHARACTERS, LATER_CHARACTERS)
    idle_mb, before_ns, begun_s = memory_mb(proxy, "VmRSS"), proxy.cpu_ns(), time.monotonic()
    replies = await run_sessions(proxy.port, workload, Arm("sizing", True, agents), range(agents))
    duration_s, cpu_s = time.monotonic() - begun_s, (proxy.cpu_ns() - before_ns) / 1e9
    first = first_token_ms(replies, 0.5) or 0.0, first_token_ms(replies, 0.99) or 0.0
    tokens = sum(reply.reply_tokens for reply in replies)
    peak_mb, end_mb = memory_mb(proxy, "VmHWM"), memory_mb(proxy, "VmRSS")
    return Size(agents, idle_mb, peak_mb, end_mb, cpu_s, duration_s, tokens, first)


def run(counts: Sequence[int], tokenizer: Path | None, groups: Sequence[Path]) -> list[Size]:
    sizes = []
    for count in counts:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            proxy, upstream = stack.enter_context(remote_proxy(folder, tokenizer))
            for group in groups:
                (group / "cgroup.procs").write_text(str(proxy.pid))
            stack.enter_context(on_core(1))
            sizes.append(uvloop.run(measure(proxy, upstream, count)))
    return sizes


def report(sizes: Sequence[Size], console: Console) -> None:
    table = Table(title=f"Agents of {TURNS} turns of {REPLY_TOKENS} tokens, at {RATE:g} a second", title_justify="left")
    columns = (
        "agents",
        "idle MB",
        "peak MB",
        "end MB",
        "cores",
        "CPU s per 1,000 tokens",
        "tokens/s",
        "first token ms",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for size in sizes:
        table.add_row(
            str(size.agents),
            *(f"{value:.0f}" for value in (size.idle_mb, size.peak_mb, size.end_mb)),
            f"{size.cpu_s / size.duration_s:.2f}",
            f"{size.cpu_s / size.tokens * 1000:.3f}",
            f"{size.tokens / size.duration_s:.0f}",
            " / ".join(f"{value:.0f}" for value in size.first_ms),
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[1, 32, 128])
    parser.add_argument(
        "--cgroup", type=Path, action="append", default=[], help="a control group that the server joins"
    )
    options = parser.parse_args()
    console, tokenizer = Console(width=140), assets_tokenizer()
    console.print(machine())
    report(run(options.counts, tokenizer, options.cgroup), console)


if __name__ == "__main__":
    main()
