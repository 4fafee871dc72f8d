"""The JSON of sessions and groups in listings says each number under its own name."""

from __future__ import annotations

from array import array
from dataclasses import replace

from proxy.api.listing import _together
from proxy.api.listing_json import group_json, summary_json
from proxy.trajectory.summary import Summary
from proxy.types import GroupSummary, SessionRecord
from tokengrove.options.session import SessionStatus


def summary(score: float | None = None, versions: tuple[int, int] | None = None) -> Summary:
    return Summary(
        turns=9,
        failed=1,
        aborted=2,
        superseded=3,
        forks=4,
        reasons={"first": 9},
        prompt_tokens=50,
        output_tokens=60,
        score=score,
        rewarded=score is not None,
        returns=array("d", [1.0, 3.0, 2.0]),
        versions=versions,
        purposes={"main": 8},
        agents=("a",),
    )


def group(name: str = "g", ended: int = 0, active: int = 0) -> GroupSummary:
    by_status = {SessionStatus.ENDED: ended, SessionStatus.ACTIVE: active}
    return GroupSummary(name, number=1, size=None, by_status=by_status, created_at=1.0, last_at=2.0)


def test_a_summary_has_each_number_under_its_name() -> None:
    found = summary_json(summary(0.5, (3, 7)), running=5, last_at=8.0)
    assert found == {
        **{"turns": 9, "running": 5, "failed": 1, "aborted": 2, "superseded": 3, "forks": 4, "reasons": {"first": 9}},
        **{"prompt_tokens": 50, "output_tokens": 60, "score": 0.5, "rewarded": True, "versions": [3, 7]},
        "returns": {"first": 1.0, "mean": 2.0, "min": 1.0, "max": 3.0},
        **{"purposes": {"main": 8}, "agents": ["a"], "last_at": 8.0},
    }


def test_the_returns_of_a_group_are_those_of_its_rewarded_sessions() -> None:
    zeros = replace(summary(None), returns=array("d", [0.0]))
    found = group_json(group(), [(SessionRecord("a"), summary(1.0)), (SessionRecord("b"), zeros)])
    assert (found["counted"], found["rewarded"], found["returns"]["min"]) == (2, 1, 1.0)


def test_a_group_names_its_first_ten_tasks_and_the_range_of_all_versions() -> None:
    ranges = [(3, 4), None, (1, 9)]
    sessions = [
        (SessionRecord(f"s{number}", task_id=f"t{number}"), summary(None, ranges[number % 3])) for number in range(12)
    ]
    found = group_json(group(ended=12), sessions)
    assert (found["task_ids"], found["versions"]) == ([f"t{number}" for number in range(10)], [1, 9])


def test_groups_are_read_together_whose_sessions_are_no_more_than_a_piece() -> None:
    groups = [group(str(count), ended=count - 1, active=1) for count in (150, 50, 1, 500, 199, 2)]
    assert [[each.group_id for each in some] for some in _together(groups)] == [
        ["150", "50"], ["1"], ["500"], ["199"], ["2"],
    ]  # fmt: skip
