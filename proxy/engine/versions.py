"""Weight versions of an output, run-length encoded: ordered pairs (token count, version); adjacent versions differ."""

from __future__ import annotations

from proxy.types import VersionRuns
from tokengrove.errors import EngineFailed

LARGEST_VERSION = 2**31 - 1
"""The largest weight version: exports store versions as int32."""


def with_run(runs: VersionRuns, count: int, version: int) -> VersionRuns:
    """Return `runs` extended by `count` tokens of `version`."""
    if not count:
        return runs
    if runs and runs[-1][1] == version:
        return (*runs[:-1], (runs[-1][0] + count, version))
    return (*runs, (count, version))


def joined(runs: VersionRuns, more: VersionRuns) -> VersionRuns:
    """Return `runs` followed by `more`."""
    for count, version in more:
        runs = with_run(runs, count, version)
    return runs


def divided(runs: VersionRuns, at: int) -> tuple[VersionRuns, VersionRuns]:
    """Split `runs` after `at` tokens."""
    for index, (count, version) in enumerate(runs):
        if at < count:
            before = (*runs[:index], (at, version)) if at else runs[:index]
            return before, ((count - at, version), *runs[index + 1 :])
        at -= count
    return runs, ()


def corrected(runs: VersionRuns, last: VersionRuns) -> VersionRuns:
    """Return `runs` with the versions of its final tokens, as many as `last` has, replaced by `last`.

    Raises EngineFailed if `last` counts more tokens than `runs`.
    """
    if not last:
        return runs
    total, new = (sum(count for count, _ in counted) for counted in (runs, last))
    if new > total:
        raise EngineFailed(f"the engine corrected the versions of {new} tokens but had sent {total}")
    return joined(divided(runs, total - new)[0], last)
