"""The figures of a server on one line of text, for a file or a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator

from tokengrove.terminal import figures
from tokengrove.terminal.watched import Statistics, forks


def statistics_line(statistics: Statistics) -> str:
    """The time of day, then all figures, including zeros, so that columns keep their places."""
    return f"{time.strftime('%H:%M:%S', time.localtime(statistics['at']))} {', '.join(_parts(statistics))}"


def _parts(statistics: Statistics) -> Iterator[str]:
    rates, first, backlog = statistics["rates"], statistics["first_token_s"], statistics["sessions"]
    yield f"turns/s {figures.rate(rates['turns_per_s'])}"
    yield f"tokens/s {figures.rate(rates['output_tokens_per_s'])}"
    yield f"first token {figures.seconds(first['p50'])}"
    yield f"in flight {figures.count(statistics['in_flight'])}"
    yield f"waiting {figures.count(statistics['waiting'])}"
    yield f"turns {figures.count(statistics['turns']['complete'])}"
    yield f"failed {figures.count(statistics['turns']['failed'] + statistics['turns']['aborted'])}"
    yield f"forks {figures.count(sum(forks(statistics).values()))}"
    yield f"unclaimed {figures.count(None if backlog is None else backlog['waiting'])}"
    versions = (statistics["rewards"] or {}).get("by_version", [])
    if versions:
        yield f"reward {figures.number(versions[-1]['mean'])} at version {versions[-1]['version']}"
