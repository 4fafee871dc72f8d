"""Numbers, spans of time and texts as they stand in a cell."""

from __future__ import annotations

import pytest

from tokengrove.terminal import figures


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-3, "0s"), (0, "0s"), (59.9, "59s"), (60, "1m"), (7199, "1h"), (86_400 * 3, "3d")]
)
def test_an_age_is_in_its_largest_unit(seconds: float, shown: str) -> None:
    assert figures.age(seconds) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0, "0"),
        (999, "999"),
        (999.6, "1.0k"),
        (1234, "1.2k"),
        (9960, "10k"),
        (999_400, "999k"),
        (2e6, "2.0M"),
    ],
)
def test_a_count_has_at_most_four_characters(value: float | None, shown: str) -> None:
    assert figures.count(value) == shown
    assert len(shown) <= 4


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (0.034, "0.034"), (5, "5"), (9.9, "9.9"), (9.99, "10"), (1500, "1.5k")]
)
def test_a_rate_has_two_digits_below_ten(value: float, shown: str) -> None:
    assert figures.rate(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (0.0123, "12.3 ms"), (0.25, "0.25 s"), (1234.5, "1234 s")])
def test_a_duration_is_in_ms_or_seconds(value: float | None, shown: str) -> None:
    assert figures.seconds(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (float("nan"), "-"), (0.123456, "0.123"), (-2.0, "-2")])
def test_a_number_has_three_digits(value: float | None, shown: str) -> None:
    assert figures.number(value) == shown


def test_a_text_becomes_one_line_that_acts_on_nothing() -> None:
    assert figures.one_line("a\nb\x1b[2J\u202ec\ud800\r") == "a↵b·[2J·c·␍"
    assert figures.one_line("x" * 1_000_000, 10) == "x" * 9 + "…"


def test_a_sparkline_is_scaled_to_the_highest_of_what_is_shown() -> None:
    assert figures.sparkline([100, 0, None, 1, 2], 4) == "▁ ▅█"
    assert figures.sparkline([0, 0], 9) == "▁▁"
    assert figures.sparkline([], 9) == figures.sparkline([1], 0) == ""


def test_a_histogram_counts_the_parts_of_a_range() -> None:
    assert figures.histogram([0, 0.1, 1, 1, 1, 1], 4) == "▅  █"
    assert figures.histogram([2, 2], 4) == "█"
    assert figures.histogram([], 4) == ""
    assert len(figures.histogram([-1e308, 1e308], 8)) == 8
