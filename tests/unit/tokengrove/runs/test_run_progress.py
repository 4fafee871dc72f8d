"""What a run shows: numbers of the moment on a terminal of any width, lines elsewhere, the summary at its end."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, FailureKind, Server, Task
from tokengrove.runs import Summary
from tokengrove.runs.progress import LiveProgress
from tokengrove.runs.report import duration, flowed, number, summary_text


def summary_of(episodes: int = 8, group_size: int = 4) -> tuple[Summary, list[float]]:
    """A summary, and a list whose only number is the time in seconds."""
    now = [100.0]
    return Summary("try", episodes, group_size, success=1.0, clock=lambda: now[0]), now


def result(
    number: int, reward: float | None = None, failure: FailureKind | None = None, tokens: int = 10
) -> EpisodeResult:
    return EpisodeResult(
        f"task-{number // 4}",
        number % 4,
        0,
        f"session-{number}",
        reward,
        failure=failure,
        turns=1,
        output_tokens=tokens,
    )


def plan(number: int) -> EpisodePlan:
    task = Task(f"task-{number // 4}", {})
    return EpisodePlan(task, number % 4, 0, Server("http://x"), AgentSpec("path", "a:B"), f"session-{number}")


def watched(console: Console) -> tuple[LiveProgress, Summary, list[float]]:
    """A progress of which two episodes run, two are played and one has failed, after ten seconds."""
    summary, now = summary_of()
    progress = LiveProgress(console)
    progress.planned(8, 0, summary)
    for each in range(5):
        progress.started(plan(each))
    for each in (result(0, 1.0), result(1, 0.0), result(2, None, "timeout")):
        progress.finished(each)
        summary.add((0, each.task_id), each)
    now[0] = 110.0
    return progress, summary, now


def console_of(width: int, *, terminal: bool = True) -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, width=width, force_terminal=terminal, color_system=None), text


def test_a_line_has_counts_failures_by_kind_the_mean_reward_the_pace_and_the_time_left() -> None:
    progress, _, _ = watched(console_of(80)[0])
    assert progress.line() == (
        "3/8 episodes, 2 running, 3 left, 1 failed (timeout 1), mean reward 0.5, 3 tokens/s, after 10s, 17s to go"
    )


def test_a_retried_episode_runs_no_more_until_it_begins_again() -> None:
    progress, summary, _ = watched(console_of(80)[0])
    progress.retried(result(3, None, "worker"))
    summary.retries["worker"] += 1
    assert "1 running, 4 left, 1 failed (timeout 1), 1 retried (worker 1)" in progress.line()
    progress.started(plan(3))
    assert "2 running, 3 left" in progress.line()


@pytest.mark.parametrize("width", [120, 60, 24, 8, 1])
def test_no_line_is_wider_than_the_terminal_and_no_fact_is_missing(width: int) -> None:
    progress, _, _ = watched(console_of(80)[0])
    console, text = console_of(width)
    console.print(progress)
    assert max(map(len, text.getvalue().splitlines())) <= max(width, 8)
    shown = "  ".join(line.plain for line in flowed(progress.facts(), width))
    assert shown.split("  ") == [fact.text for fact in progress.facts()]


def test_a_terminal_is_left_with_the_lines_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    console, text = console_of(60)
    progress, _, _ = watched(console)
    with progress:
        progress.say("server at http://127.0.0.1:1")
        progress.stopping("Ctrl-C")
        assert progress.line().endswith("stopping")
    assert "server at http://127.0.0.1:1\n" in text.getvalue()
    assert "stopping: Ctrl-C\n" in text.getvalue()
    assert "\x1b[?25h" in text.getvalue()  # the cursor is back


def test_without_a_terminal_a_line_comes_now_and_then() -> None:
    told = threading.Semaphore(0)

    class Lines(io.StringIO):
        def write(self, text: str) -> int:
            told.release()
            return super().write(text)

    file = Lines()
    progress, summary, _ = watched(Console(file=file, width=20, force_terminal=False))
    progress._every_s = 0.001
    with progress:
        for _ in range(4):
            told.acquire()
    lines = file.getvalue().splitlines()
    assert lines[0] == progress.line()  # one line, however narrow the log is
    assert "\x1b" not in file.getvalue()
    count = file.getvalue()
    summary.add((0, "task-1"), result(4, 1.0))
    assert file.getvalue() == count  # nothing is told after the block


def test_quiet_shows_nothing() -> None:
    console, text = console_of(60)
    summary, _ = summary_of()
    with LiveProgress(console, quiet=True) as progress:
        progress.planned(8, 2, summary)
        progress.stopping("Ctrl-C")
    assert text.getvalue() == ""


def test_episodes_of_an_earlier_start_are_told_and_do_not_count_in_the_time_left() -> None:
    console, text = console_of(60, terminal=False)
    summary, now = summary_of()
    summary.add((0, "task-0"), result(0, 1.0), earlier=True)
    progress = LiveProgress(console)
    progress.planned(8, 1, summary)
    assert text.getvalue() == "1 of 8 episodes were played before\n"
    now[0] = 110.0
    assert "to go" not in progress.line()
    summary.add((0, "task-0"), result(1, 1.0))
    assert "1m 00s to go" in progress.line()


def test_the_summary_has_rewards_pass_at_k_tokens_time_and_what_failed() -> None:
    _, summary, _ = watched(console_of(80)[0])
    summary.retries["server"] += 2
    summary.stopped = "Ctrl-C"
    summary.output = "runs/try/samples.npz"
    summary.end()
    assert summary_text(summary).splitlines() == [
        "episodes      2 of 8",
        "failed        1: timeout 1",
        "              timeout, as task task-0, sample 2: ",
        "not played    5",
        "played again  2: server 2",
        "mean reward   0.5",
        "              0.333 with failed episodes as 0",
        "pass@1        0.333",
        "pass@2        0.667",
        "tokens        0 prompt, 30 sampled, 3 turns",
        "time          10s, 3 sampled tokens/s",
        "samples       runs/try/samples.npz",
        "stopped       Ctrl-C",
    ]


def test_a_run_without_rewards_says_so() -> None:
    summary, _ = summary_of(1, 1)
    summary.add((0, "task-0"), result(0))
    assert "mean reward  none: no episode has one" in summary_text(summary)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0s"), (59.6, "1m 00s"), (200, "3m 20s"), (3600, "1h 00m"), (7500, "2h 05m")]
)
def test_durations_have_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "text"), [(0.41234, "0.412"), (12.345, "12.3"), (1234.5, "1234"), (-0.5, "-0.5")])
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_a_bar_that_is_stopped_at_once_gives_the_cursor_back() -> None:
    console, text = console_of(80)
    progress = LiveProgress(console)
    with progress:
        assert text.getvalue().count("\x1b[?25l") == 1
        progress.stop()
        assert text.getvalue().count("\x1b[?25h") == 1
