"""The list of sessions of `GET /rl/sessions` with `summary` for a terminal, a line each, and what a search found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from tokengrove.terminal import figures
from tokengrove.terminal.fitting_table import Column, FittingTable

Entry = Mapping[str, Any]

_COLOURS = {"active": "green", "expired": "yellow", "Failed": "red", "Finished": "", "withdrawn": "dim"}


def session_table(
    entries: Sequence[Entry], now: float, counts: Mapping[str, int] | None, *, more: bool, caption: str | None = None
) -> FittingTable:
    """A table of `entries`. `now`: Unix seconds. `counts`: the number of matching sessions by status, if known.

    `more`: whether there are further sessions. `caption`: replaces the text below the table.
    """
    beneath = _caption(len(entries), counts, more) if caption is None else Text(caption, "dim")
    return FittingTable(_columns(now), entries, beneath)


def _columns(now: float) -> list[Column]:
    return [
        Column("session", 0, 12, lambda entry: figures.one_line(entry["session_id"]), whole=True),
        Column("status", 1, 8, status),
        Column("turns", 3, 5, _turns, right=True),
        Column("forks", 4, 5, lambda entry: figures.count(entry["summary"]["forks"]), right=True),
        Column("tokens", 5, 6, _tokens, right=True),
        Column("score", 2, 6, lambda entry: figures.number(entry["summary"]["score"]), right=True),
        Column("version", 9, 7, lambda entry: versions(entry["summary"]["versions"], entry["version"]), right=True),
        Column("group", 7, 8, lambda entry: figures.one_line(entry["group_id"] or figures.NONE)),
        Column("task", 8, 8, lambda entry: figures.one_line(entry["task_id"] or figures.NONE)),
        Column("age", 6, 4, lambda entry: figures.age(now - entry["created_at"]), right=True),
    ]


def status(entry: Entry) -> Text:
    """The state of a session: `withdrawn`, else its outcome, else its status; with the number of running calls."""
    word = "withdrawn" if entry.get("withdrawn") else entry["outcome"] or entry["status"]
    running = entry["summary"]["running"]
    return Text(f"{word}, {running} running" if running else word, _COLOURS.get(word, ""))


def versions(of_tokens: Sequence[int] | None, at_start: int | None) -> str:
    """The weight versions that sampled its tokens, else the version at its start."""
    if of_tokens is None:
        return figures.NONE if at_start is None else str(at_start)
    low, high = of_tokens
    return str(low) if low == high else f"{low}-{high}"


def _turns(entry: Entry) -> Text:
    summary = entry["summary"]
    lost = summary["failed"] + summary["aborted"]
    return Text.assemble(figures.count(summary["turns"]), (f" +{lost} lost" if lost else "", "red"))


def _tokens(entry: Entry) -> str:
    return figures.count(entry["summary"]["prompt_tokens"] + entry["summary"]["output_tokens"])


def _caption(listed: int, counts: Mapping[str, int] | None, more: bool) -> Text:
    by_status = ", ".join(f"{count} {name}" for name, count in (counts or {}).items() if count)
    if counts is not None and not listed and by_status:
        return Text(f"no session matches; with another status: {by_status}", "dim")
    if not listed:
        return Text("no session matches", "dim")
    others = "; --limit lists more" if more else ""
    return Text(f"{listed} listed{f' ({by_status})' if by_status else ''}{others}", "dim")


def matches(entries: Sequence[Entry], unindexed: int) -> Iterator[Text]:
    """A line for each turn in `matches` of the entries. `unindexed`: sessions that are not searched whole."""
    for entry in entries:
        for match in entry["matches"]:
            before, found, after = (figures.one_line(match["snippet"][name]) for name in ("before", "match", "after"))
            place = figures.one_line(f"{entry['session_id']} {match['interaction_id']}: ")
            yield Text.assemble((place, "dim"), before, (found, "bold"), after)
    if unindexed:
        yield Text(f"{unindexed} sessions have turns that are not indexed yet", "yellow")
