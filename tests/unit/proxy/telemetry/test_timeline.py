"""The phases of a turn, from its moments."""

from __future__ import annotations

import pytest

from proxy.telemetry.timeline import Timeline


def at(**moments: float) -> Timeline:
    timeline = Timeline()
    for name, moment in moments.items():
        setattr(timeline, name, moment)
    return timeline


COMPLETE = {
    **{"begun": 1.0, "matched": 2.0, "rendered": 3.0, "admitted": 4.0, "first_token": 5.0, "sampled": 6.0},
    **{"commit_begun": 7.0, "committed": 8.0, "ended": 9.0},
}


def test_a_turn_is_matched_rendered_queued_generated_and_committed() -> None:
    assert at(**COMPLETE).phases() == [
        ("match", 1.0, 2.0),
        ("render", 2.0, 3.0),
        ("queue", 3.0, 4.0),
        ("generate", 4.0, 6.0),
        ("commit", 7.0, 8.0),
    ]


def test_a_turn_that_waited_for_the_engine_was_queued_before_it_was_matched() -> None:
    phases = at(**COMPLETE, held=1.25, let_in=1.5).phases()
    assert phases[:2] == [("queue", 1.25, 1.5), ("match", 1.5, 2.0)]
    assert phases[2:] == at(**COMPLETE).phases()[1:]


@pytest.mark.parametrize(
    ("reached", "last"),
    [
        (0, ("match", 1.0, 99.0)),
        (1, ("render", 2.0, 99.0)),
        (2, ("queue", 3.0, 99.0)),
        (3, ("generate", 4.0, 99.0)),
        (6, ("commit", 7.0, 99.0)),
    ],
)
def test_the_last_phase_of_a_failed_turn_ends_with_the_failure(reached: int, last: tuple[str, float, float]) -> None:
    moments = dict(list(COMPLETE.items())[: reached + 1])
    phases = at(**moments, failed=99.0, ended=100.0).phases()
    assert phases[-1] == last
    assert phases[:-1] == at(**COMPLETE).phases()[: len(phases) - 1]


def test_a_request_that_is_refused_while_it_waits_was_only_queued() -> None:
    assert at(begun=1.0, held=2.0, ended=5.0).phases() == [("queue", 2.0, 5.0)]


def test_a_turn_without_tokens_to_sample_has_no_generation() -> None:
    moments = {name: moment for name, moment in COMPLETE.items() if name not in ("admitted", "first_token")}
    assert [phase.name for phase in at(**moments).phases()] == ["match", "render", "queue", "commit"]


def test_a_phase_that_still_runs_is_left_out() -> None:
    assert at(begun=1.0, matched=2.0).phases() == [("match", 1.0, 2.0)]


def test_events_are_kept_in_order() -> None:
    timeline = Timeline()
    timeline.note("engine_lost", reason="gone")
    timeline.note("submitted_again", tokens=3)
    assert [(event.name, event.attributes) for event in timeline.events] == [
        ("engine_lost", {"reason": "gone"}),
        ("submitted_again", {"tokens": 3}),
    ]
    assert timeline.events[0].at <= timeline.events[1].at
