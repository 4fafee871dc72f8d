"""What the page costs a turn, and how soon it paints: people look at it in a real Chromium while turns run.

The server has one core; its load and Chromium have the other. Arms take turns in one run: nobody looks, one list of
sessions is open, five overviews are. Two loads: as many turns as the server can, and a pace, where what the page costs
is not shared by many turns. Paint times are Chromium's own performance entries, each the median of some fresh tabs. No
figure fails the bench.

Run `python -m tests.bench.page [--quick]` from the root of the repository. It needs tests/browser/requirements.txt."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from rich.console import Console
from rich.table import Table

from tests.bench.load import Conversation, Series, Words, connect, new_path, sending, under_load
from tests.bench.overhead import machine
from tests.bench.servers import Server, allow_open_files, on_core, proxy_server
from tests.browser import data, episodes, tools
from tests.browser.views import session

NOBODY, LIST, OVERVIEWS = "nobody looks", "one list of sessions", "five overviews"
ARMS: Mapping[str, tuple[str, ...]] = {NOBODY: (), LIST: ("/#/sessions",), OVERVIEWS: ("/#/overview",) * 5}
IN_FLIGHT, PHASE_S, SCREEN = 32, 60.0, {"width": 1366, "height": 768}
DRAWN: Mapping[str, tuple[str, str]] = {
    "list of sessions": ("/#/sessions", "main table tbody tr"),
    "groups": ("/#/groups", "main table tbody tr"),
    "overview": ("/#/overview", "main canvas"),
    "session with forks": (session(episodes.FORKED), "main [role=treeitem]"),
    "one turn": (session(episodes.FORKED, "?turn=6"), "main .turn h2"),
    "tokens of a path of 68,931": (session(episodes.LONG_PATH, "?turn=4&show=tokens"), "main .token"),
}
"""Views with an element of each that is there once its data are drawn."""
_WATCH = """
(selector) => {
  window.painted = {};
  new PerformanceObserver((list) => { for (const entry of list.getEntries()) painted.largest = entry.startTime; })
    .observe({ type: "largest-contentful-paint", buffered: true });
  const look = () => document.querySelector(selector)
    ? requestAnimationFrame(() => requestAnimationFrame((at) => { painted.drawn = at; }))
    : requestAnimationFrame(look);
  look();
}
"""
_READ = """
async () => {
  while (!painted.drawn && performance.now() < 30_000) await new Promise(requestAnimationFrame);
  const first = performance.getEntriesByName("first-contentful-paint")[0]?.startTime;
  return { ...painted, first, nodes: document.querySelectorAll("*").length };
}
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure: turns of a round, rounds, the pace in turns a second and its seconds, and fresh tabs."""

    turns: int = 2000
    rounds: int = 3
    pace: float = 50.0
    pace_s: float = 10.0
    tabs: int = 5


@dataclass(slots=True)
class Figures:
    """Of one arm: the load as fast as it goes, and at a pace."""

    fast: Series = field(default_factory=Series)
    paced: Series = field(default_factory=Series)


async def at_pace(server: Server, words: Words, plan: Plan, series: Series) -> None:
    """Send turns one after another, each at its time."""
    connection = await connect(server)
    cpu_ns, begun = server.cpu_ns(), time.perf_counter()
    for number in range(round(plan.pace * plan.pace_s)):
        await asyncio.sleep(max(0.0, begun + number / plan.pace - time.perf_counter()))
        asked = time.perf_counter_ns()
        await connection.post(new_path(), Conversation(words).next_body())
        series.latencies.append(time.perf_counter_ns() - asked)
    series.rates.append(plan.pace)
    series.cpu_ns += server.cpu_ns() - cpu_ns
    connection.close()


async def at_full_speed(server: Server, words: Words, plan: Plan, series: Series) -> None:
    """Keep `IN_FLIGHT` requests in flight."""
    requests = [(new_path(), Conversation(words).next_body()) for _ in range(plan.turns)]
    works = [sending(requests[lane::IN_FLIGHT]) for lane in range(IN_FLIGHT)]
    await under_load(server, works, series, PHASE_S)


@contextmanager
def looking(browser: Browser, server: Server, addresses: tuple[str, ...]) -> Iterator[None]:
    """Have pages open, each live."""
    context = browser.new_context(viewport=SCREEN)
    for address in addresses:
        page = context.new_page()
        page.goto(server.url + address)
        page.wait_for_selector("header .live-on")
    yield
    context.close()


def turns(browser: Browser, server: Server, plan: Plan) -> dict[str, Figures]:
    """Measure the arms by turns, after a warm-up."""
    words, figures = Words(0), {name: Figures() for name in ARMS}
    with ThreadPoolExecutor(1) as threads:  # this thread has Playwright's event loop

        def load(make: Callable[[Server, Words, Plan, Series], Any], series: Series) -> None:
            threads.submit(lambda: asyncio.run(make(server, words, plan, series))).result()

        load(at_full_speed, Series())
        for _ in range(plan.rounds):
            for name, addresses in ARMS.items():
                with looking(browser, server, addresses):
                    load(at_full_speed, figures[name].fast)
                    load(at_pace, figures[name].paced)
    return figures


def paint(context: BrowserContext, address: str, selector: str) -> dict[str, float]:
    """Open a view in a new tab; when it painted, in ms after the navigation began."""
    page: Page = context.new_page()
    page.add_init_script(f"({_WATCH})({selector!r})")
    page.goto(address)
    found: dict[str, float] = page.evaluate(_READ)
    page.close()
    if "drawn" not in found:
        raise SystemExit(f"{address} did not show {selector} within 30 s")
    return found


def paints(browser: Browser, url: str, plan: Plan) -> dict[str, list[dict[str, float]]]:
    """Open each view in some fresh tabs, with an empty cache."""
    found: dict[str, list[dict[str, float]]] = {}
    for name, (address, selector) in DRAWN.items():
        for _ in range(plan.tabs):
            context = browser.new_context(viewport=SCREEN)
            found.setdefault(name, []).append(paint(context, url + address, selector))
            context.close()
    return found


def turns_table(figures: Mapping[str, Figures], plan: Plan) -> Table:
    table = Table(title=f"Turns, {IN_FLIGHT} in flight, and {plan.pace:g} a second", title_justify="left")
    table.add_column("arm")
    for column in (
        "CPU ms a turn",
        "ratio",
        "turns/s",
        "p99 ms",
        "paced: CPU ms a turn",
        "ratio",
        "p99 ms",
        "core share",
    ):
        table.add_column(column, justify="right")
    alone = figures[NOBODY]
    for name, found in figures.items():
        fast, paced = found.fast, found.paced
        table.add_row(
            name,
            *(f"{fast.cpu_us / 1e3:.3f}", f"{fast.cpu_us / alone.fast.cpu_us:.2f}", f"{fast.rate:.0f}"),
            *(f"{fast.quantile_ms(0.99):.1f}", f"{paced.cpu_us / 1e3:.3f}"),
            *(f"{paced.cpu_us / alone.paced.cpu_us:.2f}", f"{paced.quantile_ms(0.99):.1f}"),
            f"{paced.cpu_us * plan.pace / 1e6:.3f}",
        )
    return table


def paints_table(found: Mapping[str, list[dict[str, float]]]) -> Table:
    table = Table(title="Paint, ms after the navigation began", title_justify="left")
    table.add_column("view")
    for column in ("first contentful", "largest contentful", "data drawn", "elements"):
        table.add_column(column, justify="right")
    for name, entries in found.items():
        keys = ("first", "largest", "drawn", "nodes")
        table.add_row(name, *(f"{statistics.median(each.get(key, 0.0) for each in entries):.0f}" for key in keys))
    return table


@contextmanager
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright, on_core(1):
        yield playwright.chromium.launch(
            executable_path=tools.chromium(), args=["--no-sandbox"] if os.geteuid() == 0 else []
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round")
    plan = Plan(turns=400, rounds=1, pace_s=6.0, tabs=1) if parser.parse_args().quick else Plan()
    console = Console(width=max(140, Console().width))
    console.print(f"{machine()}\n", highlight=False)
    allow_open_files()
    logging.disable(logging.CRITICAL)  # of turns that fail on purpose
    with ExitStack() as stack:
        folder, second = (Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(2))
        url = f"sqlite:///{second / 'bench.db'}"
        data.prepare(url)
        asyncio.run(data.fill_kinds(url))
        server = stack.enter_context(proxy_server(folder, None))
        filled = stack.enter_context(proxy_server(second, None))
        browser = stack.enter_context(chromium())
        console.print(paints_table(paints(browser, filled.url, plan)))
        console.print(turns_table(turns(browser, server, plan), plan))


if __name__ == "__main__":
    main()
