"""Runs of weight versions: (count of tokens, version) from an answer's first token on; neighbours are unequal."""

from __future__ import annotations

from proxy.errors import EngineFailed
from proxy.types import VersionRuns

LARGEST_VERSION = 2**31 - 1
"""Of weights: exports hold the versions of tokens as int32."""


def with_run(runs: VersionRuns, count: int, version: int) -> VersionRuns:
    """`runs` and `count` more tokens of `version`."""
    if not count:
        return runs
    if runs and runs[-1][1] == version:
        return (*runs[:-1], (runs[-1][0] + count, version))
    return (*runs, (count, version))


def joined(runs: VersionRuns, more: VersionRuns) -> VersionRuns:
    """`runs` and then `more`."""
    for count, version in more:
        runs = with_run(runs, count, version)
    return runs


def divided(runs: VersionRuns, at: int) -> tuple[VersionRuns, VersionRuns]:
    """The runs of the first `at` tokens, and those of the rest."""
    before: VersionRuns = ()
    after: VersionRuns = ()
    for count, version in runs:
        first = min(count, at)
        at -= first
        before, after = with_run(before, first, version), with_run(after, count - first, version)
    return before, after


def corrected(runs: VersionRuns, last: VersionRuns) -> VersionRuns:
    """`runs` where the tokens at the end, as many as `last` counts, are of the versions in `last`.

    Raises EngineFailed when there are fewer.
    """
    if not last:
        return runs
    total, new = (sum(count for count, _ in counted) for counted in (runs, last))
    if new > total:
        raise EngineFailed(f"the engine corrected the versions of {new} tokens and has given {total}")
    return joined(divided(runs, total - new)[0], last)
