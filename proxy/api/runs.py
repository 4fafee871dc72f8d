"""Figures of sessions by training run and step: sums over one page of sessions, which add up over pages.

Run and step are values of the sessions' metadata. A request reads no more sessions and turns than a page of a listing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from proxy.api.known_fields import check_known
from proxy.api.listing import Listing
from proxy.api.listing_request import parse_listing
from proxy.api.summaries import Summed
from proxy.protocols.fields import check_text
from proxy.store.recordings import SessionReads
from proxy.store.text_search import TextSearch
from proxy.trajectory.mismatch import ratio_of
from tokengrove.errors import InvalidRequest

_FIELDS = ("run", "step", "filter", "cursor", "limit")
_RUN, _STEP = "experiment", "step"
_MOST_WORST = 10
_LONGEST_KEY = 200
_NAME = str | int | float | None


@dataclass(slots=True)
class _Sums:
    """Sums over the sessions of a run and step. `scores`: of rewarded sessions, with their ids."""

    sessions: int = 0
    ended: int = 0
    turns: int = 0
    forks: int = 0
    failed: int = 0
    output_tokens: int = 0
    compared: int = 0
    kl: float = 0.0
    log_ratio: float = 0.0
    scores: list[tuple[float, str]] = field(default_factory=list)

    def add(self, summed: Summed, told: Mapping[str, Any] | None) -> None:
        """Add a session. `told`: what trainers told of it, in sum."""
        record, summary = summed.session.record, summed.summary
        self.sessions += 1
        self.ended += record.ended_at is not None
        self.turns += summary.turns
        self.forks += summary.forks
        self.failed += summary.failed + summary.aborted
        self.output_tokens += summary.output_tokens
        if summary.score is not None:
            self.scores.append((summary.score, record.session_id))
        if told is not None:
            self.compared += int(told["compared"])
            self.kl += told["kl"]
            self.log_ratio = max(self.log_ratio, told["log_ratio"])

    def to_json(self) -> dict[str, Any]:
        worst = nsmallest(_MOST_WORST, self.scores)
        return {
            **{name: getattr(self, name) for name in ("sessions", "ended", "turns", "forks", "failed")},
            "output_tokens": self.output_tokens,
            "rewarded": len(self.scores),
            "score_sum": sum(score for score, _ in self.scores),
            "score_squares": sum(score * score for score, _ in self.scores),
            "compared": self.compared,
            "kl_sum": self.kl,
            "largest_ratio": ratio_of(self.log_ratio) if self.compared else None,
            "worst": [{"session_id": name, "score": score} for score, name in worst],
        }


class Runs:
    """Reads the figures."""

    def __init__(self, recordings: SessionReads, listing: Listing, search: TextSearch) -> None:
        self._recordings, self._listing, self._search = recordings, listing, search

    async def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The answer to a query of `/rl/runs`. Raises InvalidRequest."""
        check_known(query, _FIELDS)
        run_key, step_key = (_key(query, name, default) for name, default in (("run", _RUN), ("step", _STEP)))
        wanted = parse_listing({name: query[name] for name in ("filter", "cursor", "limit") if name in query})
        self._search.check(wanted.query)
        page = await self._listing.page(wanted)
        names = [each.session.record.session_id for each in page.sessions]
        told = await self._recordings.sum_annotations(names)
        sums = _summed(page.sessions, told, run_key, step_key)
        entries = [{"run": run, "step": step, **each.to_json()} for (run, step), each in sums]
        return {"runs": entries, "cursor": page.cursor}


def _summed(
    sessions: Sequence[Summed], told: Mapping[str, Mapping[str, Any]], run_key: str, step_key: str
) -> Iterable[tuple[tuple[_NAME, _NAME], _Sums]]:
    """The sums by run and step, in order of appearance. Validation and withdrawn sessions do not count."""
    found: dict[tuple[_NAME, _NAME], _Sums] = {}
    for summed in sessions:
        record = summed.session.record
        if record.withdrawn or record.validation:
            continue
        key = _name(record.metadata.get(run_key)), _name(record.metadata.get(step_key))
        found.setdefault(key, _Sums()).add(summed, told.get(record.session_id))
    return found.items()


def _name(value: Any) -> _NAME:
    """A run or a step; null for values that name none."""
    return value if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _key(query: Mapping[str, str], name: str, default: str) -> str:
    key = query.get(name, default)
    if not 0 < len(key) <= _LONGEST_KEY:
        raise InvalidRequest(f"'{name}' must be a key of metadata, of 1 to {_LONGEST_KEY} characters", param=name)
    return check_text(key, name)
