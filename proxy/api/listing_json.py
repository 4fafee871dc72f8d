"""The JSON of the sessions and groups in listings. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from proxy.api.session_json import record_json
from proxy.store.text_query import Match
from proxy.trajectory.summary import Spread, Summary, spread, version_range
from proxy.types import GroupSummary, SessionRecord
from tokengrove.options.session import SessionStatus

_MOST_TASKS = 10


def listed_json(record: SessionRecord, summary: Summary, running: int, *, returns: bool = False) -> dict[str, Any]:
    """An entry of the listing with its summary. `running`: the number of calls that have begun and not ended."""
    shown = summary_json(summary, running, record.updated_at)
    if returns:
        shown["returns"]["values"] = summary.returns.tolist()
    return {**record_json(record), "summary": shown}


def summary_json(summary: Summary, running: int, last_at: float) -> dict[str, Any]:
    """The summary of a session's turns. `last_at`: the last commit or change."""
    low, high = summary.versions or (None, None)
    return {
        "turns": summary.turns,
        "running": running,
        "failed": summary.failed,
        "aborted": summary.aborted,
        "superseded": summary.superseded,
        "forks": summary.forks,
        "reasons": dict(summary.reasons),
        "prompt_tokens": summary.prompt_tokens,
        "output_tokens": summary.output_tokens,
        "score": summary.score,
        "rewarded": summary.rewarded,
        "returns": _returns(summary),
        "versions": None if summary.versions is None else [low, high],
        "purposes": dict(summary.purposes),
        "agents": list(summary.agents),
        **({"routes": summary.routes} if summary.routes else {}),
        "last_at": last_at,
    }


def group_json(group: GroupSummary, sessions: Sequence[tuple[SessionRecord, Summary]]) -> dict[str, Any]:
    """A group. Its scores, returns, tokens, tasks and versions are from `sessions`, the first sessions of the group."""
    summaries = [summary for _, summary in sessions]
    versions = version_range(summary.versions for summary in summaries)
    scores = [summary.score for summary in summaries if summary.score is not None]
    returns = [value for summary in summaries if summary.score is not None for value in summary.returns]
    return {
        "group_id": group.group_id,
        "group_size": group.size,
        "task_ids": list(dict.fromkeys(record.task_id for record, _ in sessions))[:_MOST_TASKS],
        "sessions": sum(group.by_status.values()),
        "by_status": by_status_json(group.by_status),
        "counted": len(sessions),
        "rewarded": len(scores),
        "scores": scores,
        **_spread_json(spread(scores)),
        "returns": _spread_json(spread(returns)),
        "turns": sum(summary.turns for summary in summaries),
        "output_tokens": sum(summary.output_tokens for summary in summaries),
        "versions": None if versions is None else list(versions),
        "created_at": group.created_at,
        "last_at": group.last_at,
    }


def match_json(match: Match) -> dict[str, Any]:
    """A turn that has the text of a search."""
    return {"interaction_id": match.interaction_id, "seq": match.seq, "snippet": asdict(match.snippet)}


def by_status_json(counts: dict[SessionStatus, int]) -> dict[str, int]:
    """The number of sessions for each status; 0 if there are none."""
    return {status.value: counts.get(status, 0) for status in SessionStatus}


def _returns(summary: Summary) -> dict[str, Any]:
    found = spread(summary.returns)
    return {
        "first": summary.returns[0] if summary.returns else None,
        **{name: value for name, value in _spread_json(found).items() if name != "std"},
    }


def _spread_json(found: Spread | None) -> dict[str, float | None]:
    if found is None:
        return dict.fromkeys(("mean", "std", "min", "max"))
    return {"mean": found.mean, "std": found.std, "min": found.min, "max": found.max}
