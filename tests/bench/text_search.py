"""The cost of the text index: CPU of turns with and without `--search`, what is left to index then, and its size.

Two servers get the same conversations in turn, on one core and a SQLite file each; a simulated SGLang server answers at
once. While turns run, the indexer rests for most of the time, so it falls behind a load like this one and catches up
afterwards: both are measured. `--pause-ms`: between the turns of a conversation, as with a real engine. No figure fails
the bench.

Run `python -m tests.bench.text_search [--rounds 10] [--pause-ms 200]` from the root of the repository."""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import statistics
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path

import httpx
import uvloop
from rich.console import Console

from tests.bench.load import Conversation, Lane, Series, Words, Work, under_load
from tests.bench.overhead import assets_tokenizer, machine
from tests.bench.servers import Server, allow_open_files, on_core, proxy_server
from tests.bench.upstream import model_of, upstream_server, word_tokens

IN_FLIGHT, TURNS, CHARACTERS = 32, 10, 1000
PHASE_S, WARM_UPS = 120.0, 1


def talking(conversation: Conversation, pause_s: float) -> Work:
    """A load of one conversation, whose client waits between turns."""

    async def work(lane: Lane) -> None:
        for _ in range(TURNS):
            answer = await lane.post(conversation.path, conversation.next_body())
            if answer is None:
                return
            conversation.take(answer)
            await asyncio.sleep(pause_s)

    return work


Rounds = dict[str, list[Series]]
"""A series for each round, by server."""


async def measure(servers: dict[str, Server], rounds: int, pause_s: float) -> tuple[Rounds, float, float]:
    """CPU of turns by server; CPU us per turn, and seconds, that `on` then needs for what is left to index."""
    series: Rounds = {name: [] for name in servers}
    for number in range(rounds + WARM_UPS):
        for name in sorted(servers, reverse=number % 2 == 0):  # each is as often the first one
            words, one = Words(number), Series()
            works = [talking(Conversation(words, CHARACTERS, TURNS), pause_s) for _ in range(IN_FLIGHT)]
            await under_load(servers[name], works, one, PHASE_S)
            if number >= WARM_UPS:
                series[name].append(one)
    cpu_ns, begun = servers["on"].cpu_ns(), time.perf_counter()
    async with httpx.AsyncClient(base_url=servers["on"].url) as http:
        while (await http.get("/rl/sessions?include=counts&limit=1")).json()["unindexed"]:  # noqa: ASYNC110
            await asyncio.sleep(1.0)
    left_us = (servers["on"].cpu_ns() - cpu_ns) / 1e3 / sum(len(one.latencies) for one in series["on"])
    return series, left_us, time.perf_counter() - begun


def sizes(folder: Path) -> tuple[int, int]:
    """Bytes of the index, and of the database with it."""
    with closing(sqlite3.connect(folder / "bench.db")) as connection:
        (index,) = connection.execute(
            "SELECT sum(length(block)) + (SELECT coalesce(sum(length(sz)) + 8 * count(*), 0) FROM turn_words_docsize) "
            "FROM turn_words_data"
        ).fetchone()
        (whole,) = connection.execute(
            "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        ).fetchone()
    return index, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pause-ms", type=float, default=0.0)
    options = parser.parse_args()
    allow_open_files()
    tokenizer, console = assets_tokenizer(), Console(width=max(120, Console().width))
    console.print(machine(), highlight=False)
    with ExitStack() as stack:
        folders = {name: Path(stack.enter_context(tempfile.TemporaryDirectory())) for name in ("off", "on")}
        upstream = stack.enter_context(upstream_server(folders["off"], word_tokens(model_of(tokenizer))))
        servers = {
            name: stack.enter_context(
                proxy_server(folder, tokenizer, upstream.url, *(("--search",) if name == "on" else ()))
            )
            for name, folder in folders.items()
        }
        stack.enter_context(on_core(1))
        series, left_us, seconds = uvloop.run(measure(servers, options.rounds, options.pause_ms / 1e3))
        index, whole = sizes(folders["on"])
    pairs = list(zip(series["off"], series["on"], strict=True))
    off_us, on_us = (statistics.median(each.cpu_us for each in series[name]) for name in ("off", "on"))
    ratios = sorted(on.cpu_us / off.cpu_us for off, on in pairs)
    console.print(f"{len(pairs)} rounds; CPU us a turn: off {off_us:.0f}, on {on_us:.0f}")
    console.print(f"ratio while turns run {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    console.print(f"left to index: {left_us:.0f} us a turn, {seconds:.1f} s")
    console.print(f"index {index / 1e6:.1f} MB of a database of {whole / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
