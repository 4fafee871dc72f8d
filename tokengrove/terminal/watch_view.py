"""The live view of a server: figures with their history, counts, rewards, engine servers, and the latest sessions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tokengrove.terminal import figures
from tokengrove.terminal.session_table import session_table
from tokengrove.terminal.watched import Statistics, Watched, forks
from tokengrove.texts import printable

_FIGURE = 34
"""The width of a figure without its history."""
_COUNTS = 46
_NARROW = 100
"""Below this width, counts are below the figures, not next to them."""
_MOST_VERSIONS = 6
_MOST_SERVERS = 6
_TABLE_EDGE = 3
"""Lines around the sessions: a gap, their heading and their caption."""

_CAPTION = "sessions, the latest change first"
_STATES = {"alive": "green", "failing": "yellow", "ejected": "red", "missing": "red", "leaving": "yellow"}


class WatchView:
    """Renders the current state of a server: with `whole`, all sessions, else those that fit the screen."""

    def __init__(self, watched: Watched, *, whole: bool = False, clock: Callable[[], float] = time.time) -> None:
        self._watched, self._whole, self._clock = watched, whole, clock

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = 0
        for part in self._upper(options.max_width):
            lines += len(console.render_lines(part, options.update(height=None), pad=False))
            yield part
        sessions = self._watched.latest()
        room = len(sessions) if self._whole else max(0, (options.height or console.height) - lines - _TABLE_EDGE)
        yield Text()
        yield session_table(
            sessions[:room], self._clock(), None, more=False, caption="sessions, the latest change first"
        )

    def _upper(self, width: int) -> Iterator[RenderableType]:
        yield _heading(self._watched)
        statistics = self._watched.statistics
        if statistics is None:
            return
        shown, counts = _figures(self._watched, statistics, width), _counts(statistics)
        if width < _NARROW:
            yield shown
            yield counts
        else:
            table = Table.grid(padding=(0, 2, 0, 0))
            table.add_column(width=width - _COUNTS - 2)
            table.add_column(width=_COUNTS)
            table.add_row(shown, counts)
            yield table
        if statistics["servers"]:
            yield _servers(statistics["servers"])


def _heading(watched: Watched) -> Text:
    """The server, and whether its events arrive."""
    state = Text(f"  {printable(watched.trouble)}", "bold red") if watched.trouble else Text("  live", "green")
    text = Text.assemble((printable(watched.url), "bold"), state)
    if watched.statistics is not None:
        engine, processes = watched.statistics["engine"], watched.statistics["processes"]
        text.append(
            f"  {printable(str(engine['model']))} on {engine['name']}, weight version {engine['version']}", "dim"
        )
        if engine["paused"]:
            text.append(f", paused ({engine['paused']})", "yellow")
        if processes > 1:
            text.append(f", {processes:.0f} workers", "dim")
    return text


def _figures(watched: Watched, statistics: Statistics, width: int) -> Table:
    """One line per figure: its value and its history."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, min_width=8)
    table.add_column(no_wrap=True, style="cyan")
    room = (width if width < _NARROW else width - _COUNTS - 2) - _FIGURE
    for name, value, key in _rows(statistics):
        table.add_row(Text(name), Text(value, "bold"), figures.sparkline(watched.history.get(key, ()), max(0, room)))
    return table


def _rows(statistics: Statistics) -> Iterator[tuple[str, str, str]]:
    """The name of each figure, its value, and the name of its history."""
    rates, first = statistics["rates"], statistics["first_token_s"]
    for name, key in _RATES.items():
        yield name, figures.rate(rates[key]), key
    yield "first token, half", figures.seconds(first["p50"]), "first_token_p50_s"
    yield "first token, 95 %", figures.seconds(first["p95"]), "first_token_p95_s"
    yield "in flight", figures.count(statistics["in_flight"]), "in_flight"
    yield "waiting", figures.count(statistics["waiting"]), "waiting"


_RATES = {
    "turns/s": "turns_per_s",
    "sampled tokens/s": "output_tokens_per_s",
    "prompt tokens/s": "prompt_tokens_per_s",
    "forks/s": "forks_per_s",
    "failures/s": "failed_per_s",
    "errors/s": "errors_per_s",
}


def _counts(statistics: Statistics) -> Table:
    """Counts since the start, the backlog of claims, and the rewards by weight version."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _count_rows(statistics):
        table.add_row(name, text)
    return table


def _count_rows(statistics: Statistics) -> Iterator[tuple[str, Text]]:
    yield "turns", _listed(statistics["turns"])
    yield "forks", _listed(forks(statistics))
    yield "errors", _listed(statistics["errors"], "red")
    backlog = statistics["sessions"]
    if backlog is None:
        yield "sessions", Text("the database does not answer", "red")
    else:
        yield "sessions", Text(f"{figures.count(backlog['active'])} active")
        oldest = backlog["oldest_wait_s"]
        waits = "" if oldest is None else f", the oldest for {figures.age(oldest)}"
        unclaimed, leased = figures.count(backlog["waiting"]), figures.count(backlog["leased"])
        yield "claims", Text(f"{unclaimed} unclaimed, {leased} leased{waits}")
    yield from _rewards(statistics["rewards"])


def _listed(counts: Mapping[str, float], style: str = "") -> Text:
    """Nonzero counts by name, the highest first."""
    known = sorted(((count, name) for name, count in counts.items() if count), reverse=True)
    return Text(printable(", ".join(f"{figures.count(count)} {name}" for count, name in known)) or figures.NONE, style)


def _rewards(rewards: Mapping[str, Any] | None) -> Iterator[tuple[str, Text]]:
    """The mean reward by weight version, with its history."""
    if rewards is None or not rewards["rewarded"]:
        yield "reward", Text(figures.NONE)
        return
    over_time = [period["mean"] for period in rewards["over_time"]]
    yield "reward", Text.assemble((figures.sparkline(over_time, _COUNTS - 12), "cyan"))
    for found in rewards["by_version"][-_MOST_VERSIONS:]:
        told = f"{figures.number(found['mean'])} mean of {figures.count(found['sessions'])} sessions"
        yield f"  v{found['version']}", Text(told)


def _servers(servers: list[Mapping[str, Any]]) -> Text:
    """The engine servers, servers with problems first."""
    text = Text("engine servers ", "dim")
    ordered = sorted(servers, key=lambda server: server["state"] == "alive")
    for server in ordered[:_MOST_SERVERS]:
        state, load = server["state"], figures.count(server.get("in_flight"))
        text.append(f" {printable(str(server['url']))} ")
        text.append(state, _STATES.get(state, ""))
        text.append(f" {load} in flight, version {figures.count(server.get('version'))};", "dim")
    if len(servers) > _MOST_SERVERS:
        text.append(f" and {len(servers) - _MOST_SERVERS} more", "dim")
    return text
