"""A summary counts each kind of turn by itself, and sums up only what is complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from proxy.trajectory.summary import Summary, summarise, version_range
from proxy.types import Interaction, Outline, SessionRecord
from tests.interactions import interaction
from tokengrove.reasons import Reason, Status


def summary(steps: Sequence[Interaction]) -> Summary:
    return summarise(SessionRecord("s"), Outline(list(steps), 0, 0, None))


def test_turns_are_counted_by_what_became_of_them_and_returns_are_of_the_complete_ones() -> None:
    statuses = [*[Status.COMPLETE] * 4, *[Status.FAILED] * 3, *[Status.ABORTED] * 2, Status.SUPERSEDED]
    steps = [replace(interaction(f"i{seq}", seq=seq), status=status) for seq, status in enumerate(statuses)]
    found = summary(steps)
    assert (found.turns, found.failed, found.aborted, found.superseded) == (4, 3, 2, 1)
    assert len(found.returns) == sum(found.purposes.values()) == sum(found.reasons.values()) == 4


def test_a_conversation_of_its_own_is_no_fork() -> None:
    reasons = [Reason.FIRST, Reason.CONTINUED, Reason.NEW_ROOT, Reason.BRANCHED, Reason.TOOLS_CHANGED]
    steps = [replace(interaction(f"i{seq}", seq=seq), reason=reason) for seq, reason in enumerate(reasons)]
    assert summary(steps).forks == 2


def test_at_most_twenty_agents_are_named_in_order_of_appearance() -> None:
    names = ["z", "b", "z", None, *(f"agent {number}" for number in range(30))]
    found = summary([replace(interaction(f"i{seq}", seq=seq), agent=name) for seq, name in enumerate(names)])
    assert found.agents == ("z", "b", *(f"agent {number}" for number in range(18)))


def test_the_range_of_versions_is_from_the_least_to_the_greatest_of_all() -> None:
    assert version_range([(3, 5), None, (2, 9), (4, 4)]) == (2, 9)
    assert version_range([None]) is None
