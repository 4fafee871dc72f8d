"""`tokengrove watch`: shows a server's activity, live, until Ctrl-C. In a pipe, it prints a line for each update."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from tokengrove.commands.event_stream import Connected, Lost, follow
from tokengrove.commands.shown_place import served
from tokengrove.commands.shown_session import print_json
from tokengrove.commands.trackers import StepLog, Tracker, open_runs
from tokengrove.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console

    from tokengrove.client import Client, ServerEvent
    from tokengrove.terminal.watched import Watched

INTERRUPTED = 130
_TRACK_EVERY_S = 10.0
_TRACK_SHARE = 10.0
"""How many times longer than reading the figures the pause before the next time is."""
_SESSIONS = 40
"""Sessions to read if all may have changed; a screen shows no more."""


def watch(
    url: Annotated[str, typer.Option(help="URL of the running server.")] = "http://127.0.0.1:8080",
    admin_key: Annotated[
        str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print the figures of now and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON for each update.")] = False,
    to: Annotated[
        Tracker | None, typer.Option(help="Write the figures of training runs, by step, to this tracker instead.")
    ] = None,
    project: Annotated[str, typer.Option(help="With --to: the project of the tracker.")] = "tokengrove",
    run_key: Annotated[str, typer.Option(help="With --to: the key of metadata that names the run.")] = "experiment",
    step_key: Annotated[str, typer.Option(help="With --to: the key of metadata that has the step.")] = "step",
) -> None:
    """Show a server's activity, live: rates, latencies, forks, failures, rewards, and changed sessions.

    If the output is not a terminal, each update is a line of text, or of JSON with --json. If the server stops, the
    command waits until it is available again. Ctrl-C ends it.
    """
    from rich.console import Console

    if to is not None and as_json:
        raise ConfigurationError("--to writes to a tracker: give it without --json")
    console = Console(highlight=False)
    with _ended_cleanly(), served(url, admin_key) as client:
        if to is not None:
            _track(client, StepLog(open_runs(to, project)), run_key, step_key, once=once)
        elif once:
            _print_once(client, url, console, as_json=as_json)
        elif as_json:
            _print_json(client)
        elif console.is_terminal:
            _show(client, url, console)
        else:
            _print_lines(client)


@contextmanager
def _ended_cleanly() -> Iterator[None]:
    """End the command silently on Ctrl-C, or when a reader such as `head` has left."""
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's flush at exit fails
        sys.exit(0)


def _print_once(client: Client, url: str, console: Console, *, as_json: bool) -> None:
    from tokengrove.terminal.watch_line import statistics_line
    from tokengrove.terminal.watch_view import WatchView

    statistics = client.statistics()
    if as_json:
        print_json({"event": "statistics", **statistics})
    elif not console.is_terminal:
        print(statistics_line(statistics))
    else:
        watched = _watched(url)
        watched.learn(statistics)
        _read_all(client, watched, 10)
        console.print(WatchView(watched, whole=True))


def _track(client: Client, log: StepLog, run_key: str, step_key: str, *, once: bool) -> None:
    """Write steps until Ctrl-C, which writes the steps that are not over, too."""

    def write(*, final: bool) -> None:
        for line in log.write(client.runs(run=run_key, step=step_key), final=final):
            print(line, flush=True)

    try:
        while not once:
            began = time.monotonic()
            write(final=False)
            time.sleep(max(_TRACK_EVERY_S, _TRACK_SHARE * (time.monotonic() - began)))
        write(final=True)
    except KeyboardInterrupt:
        write(final=True)
        raise
    finally:
        log.finish()


def _print_json(client: Client) -> None:
    for update in follow(client):
        if isinstance(update, Lost):
            _tell(update)
        elif not isinstance(update, Connected):
            print_json({"event": update.kind, **update.data})
            sys.stdout.flush()


def _print_lines(client: Client) -> None:
    from tokengrove.terminal.watch_line import statistics_line

    for update in follow(client, ["statistics"]):
        if isinstance(update, Lost):
            _tell(update)
        elif not isinstance(update, Connected):
            print(statistics_line(update.data), flush=True)


def _tell(lost: Lost) -> None:
    print(f"tokengrove: {lost.why}; waiting until it is there again", file=sys.stderr, flush=True)


def _show(client: Client, url: str, console: Console) -> None:
    """Fill the screen, and redraw it with each update."""
    from rich.live import Live

    from tokengrove.terminal.watch_view import WatchView

    watched = _watched(url)
    watched.learn(client.statistics())
    _read_all(client, watched, _SESSIONS)
    with Live(WatchView(watched), console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
        live.refresh()
        for update in follow(client):
            _learn(client, watched, update)
            live.refresh()


def _learn(client: Client, watched: Watched, update: ServerEvent | Connected | Lost) -> None:
    """Apply an update, and read the sessions that it names."""
    from tokengrove.client import ServerUnreachable
    from tokengrove.errors import StoreUnavailable

    try:
        if isinstance(update, Lost):
            watched.trouble = f"{update.why}; waiting until it is there again"
        elif isinstance(update, Connected):
            _read_all(client, watched, _SESSIONS)
        elif update.kind == "statistics":
            watched.learn(update.data)
        elif update.data["all"] or len(update.data["changed"]) > _SESSIONS:
            _read_all(client, watched, _SESSIONS)
        else:
            _read_changed(client, watched, update.data["changed"])
    except (ServerUnreachable, StoreUnavailable) as error:
        watched.trouble = error.message  # the stream reports when it is back


def _read_changed(client: Client, watched: Watched, changed: Sequence[str]) -> None:
    page = client.session_page({"session_ids": changed}, include=["summary"])
    watched.changed(page["sessions"], changed)


def _read_all(client: Client, watched: Watched, limit: int) -> None:
    page = client.session_page(order="newest", include=["summary"], limit=limit)
    watched.changed(page["sessions"], [])


def _watched(url: str) -> Watched:
    from tokengrove.terminal.watched import Watched

    return Watched(url)
