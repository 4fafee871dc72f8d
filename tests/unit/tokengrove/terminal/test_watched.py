"""What `tokengrove watch` knows of a server, and how it is drawn and written."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

from tokengrove.terminal.watch_line import statistics_line
from tokengrove.terminal.watch_view import WatchView
from tokengrove.terminal.watched import Watched

URL = "http://server:8080"


def statistics(*at: float, **fields: Any) -> dict[str, Any]:
    """Figures whose history has a value at each of these times: the time itself."""
    rates = ("turns", "output_tokens", "prompt_tokens", "cached_tokens", "failed", "forks", "errors", "retries")
    series = [*(f"{name}_per_s" for name in rates), "in_flight", "waiting", "first_token_p50_s", "first_token_p95_s"]
    return {
        "at": 0.0,
        "version": "1",
        "processes": 2,
        "engine": {"name": "servers", "model": "[red]m[/]\x1b[2J", "version": 3, "paused": "drain"},
        "in_flight": 4,
        "waiting": 1,
        "rates": {**{f"{name}_per_s": 1.5 for name in rates}, "over_s": 30},
        "turns": {"complete": 1200, "failed": 2, "aborted": 1},
        "tokens": {"prompt": 1, "output": 1, "cached": 0},
        "reasons": {"first": 9, "continued": 8, "branched": 2, "rewritten": 5, "drift": 0, "new_root": 3},
        "errors": {"engine_failed": 2},
        "first_token_s": {"p50": 0.25, "p95": 1.0},
        "sessions": {"active": 7, "waiting": 5, "leased": 2, "oldest_wait_s": 130.0},
        "servers": [
            {"url": "http://a", "state": "alive", "in_flight": 3, "version": 3},
            {"url": "http://b\x07", "state": "ejected", "in_flight": None, "version": None},
        ],
        "rewards": {
            "rewarded": 10,
            "sessions": 12,
            "by_version": [{"version": 2, "sessions": 4, "mean": 0.25}, {"version": 3, "sessions": 6, "mean": 0.5}],
            "over_time": [{"at": 1.0, "sessions": 4, "mean": 0.25}, {"at": 2.0, "sessions": 6, "mean": 0.5}],
        },
        "history": {"every_s": 5, "at": list(at), **{name: list(at) for name in series}},
        **fields,
    }


def entry(name: str, last_at: float, status: str = "ended", outcome: str | None = None) -> dict[str, Any]:
    summary = {
        **{"turns": 2, "running": 0, "failed": 0, "aborted": 1, "forks": 0, "prompt_tokens": 5, "output_tokens": 6},
        **{"score": None, "versions": [2, 3], "last_at": last_at},
    }
    about = {"status": status, "outcome": outcome, "group_id": None, "task_id": None, "version": 0, "created_at": 0.0}
    return {"session_id": name, **about, "summary": summary}


def drawn(watched: Watched, width: int = 140, height: int = 40) -> str:
    console = Console(width=width, height=height, color_system=None)
    with console.capture() as capture:
        console.print(WatchView(watched, clock=lambda: 60.0), height=height)
    return capture.get()


def test_each_point_of_the_history_is_kept_once() -> None:
    watched = Watched(URL)
    for at in ((1, 2, 3), (2, 3, 4), (), (4, 5)):
        watched.learn(statistics(*at))
    assert watched.history["turns_per_s"] == watched.history["in_flight"] == [1, 2, 3, 4, 5]


def test_the_session_that_changed_last_is_first_and_one_that_is_gone_leaves() -> None:
    watched = Watched(URL)
    watched.changed([entry("b", 2), entry("a", 1), entry("c", 3)], [])
    assert [each["session_id"] for each in watched.latest()] == ["c", "b", "a"]
    watched.changed([entry("a", 9)], ["a", "c"])
    assert [each["session_id"] for each in watched.latest()] == ["a", "b"]


def test_figures_that_come_end_the_trouble() -> None:
    watched = Watched(URL, trouble="no answer")
    assert "no answer" in drawn(watched)
    watched.learn(statistics())
    assert watched.trouble is None and "live" in drawn(watched)


@pytest.mark.parametrize("width", [60, 90, 100, 140, 220])
def test_the_view_fits_the_screen_and_tells_everything(width: int) -> None:
    watched = Watched(URL)
    watched.learn(statistics(1, 2, 3))
    watched.changed([entry(f"session-{number}", number) for number in range(60)], [])
    shown = drawn(watched, width)
    lines = shown.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == 40
    told = " ".join(shown.split())
    for word in ("▃▆█", "1.5", "0.25 s", "1.2k complete", "2 failed", "5 rewritten, 2 branched", "2 engine_failed"):
        assert word in told, word
    for word in (
        "7 active",
        "paused (drain)",
        "0.5 mean of 6 sessions",
        "http://b· ejected",
        "session-59",
        "2 workers",
    ):
        assert word in told, word
    assert "\x1b" not in shown and "\x07" not in shown and "[red]m[/]·[2J" in told


def test_a_low_screen_drops_sessions_not_figures() -> None:
    watched = Watched(URL)
    watched.learn(statistics())
    watched.changed([entry(f"session-{number}", number) for number in range(60)], [])
    shown = drawn(watched, 140, 14)
    assert "waiting" in shown and "session-0 " not in shown


def test_a_database_that_does_not_answer_is_told() -> None:
    watched = Watched(URL)
    watched.learn(statistics(sessions=None, rewards=None, servers=None))
    assert "the database does not answer" in drawn(watched)
    assert "unclaimed -" in statistics_line(statistics(sessions=None, rewards=None))


def test_a_line_has_the_figures_in_fixed_places() -> None:
    assert statistics_line(statistics()).split(" ", 1)[1] == (
        "turns/s 1.5, tokens/s 1.5, first token 0.25 s, in flight 4, waiting 1, turns 1.2k, failed 3, forks 7, "
        "unclaimed 5, reward 0.5 at version 3"
    )
