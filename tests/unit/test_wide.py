"""A quick run of a crossed test has each value of each of its parameters; the rest is wide. Thirds divide all tests."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.wide import CROSSED, WIDE, mark_combinations, other_thirds


class Case:
    """A collected test of two lists of parameters, and of a fixture with parameters."""

    def __init__(self, word: str, number: tuple[int, str], database: str, *marks: pytest.MarkDecorator) -> None:
        self.nodeid = f"test_a.py::test_b[{word}-{number}-{database}]"
        params = {"word": word, "number": number[0], "name": number[1], "database": database}
        self.callspec = SimpleNamespace(params=params)
        self.marks = [mark.mark for mark in marks]

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks.append(mark.mark)

    def iter_markers(self, name: str) -> list[Any]:
        return [SimpleNamespace(args=[names]) for names in ("word", "number, name")]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return next((mark for mark in self.marks if mark.name == name), None)


LISTS = (("a", "b"), ((1, "one"), (2, "two"), (3, "three")), ("sqlite", "postgres"))


def quick(*cases: Case) -> list[tuple[str, int, str]]:
    mark_combinations(cast("list[pytest.Item]", cases))
    left = [case.callspec.params for case in cases if not case.get_closest_marker("wide")]
    return [(params["word"], params["number"], params["database"]) for params in left]


def test_each_value_is_in_one_combination_and_there_are_no_more_than_the_longest_list_has() -> None:
    cases = [Case(*values, CROSSED) for values in product(*LISTS)]
    assert quick(*cases) == [("a", 1, "sqlite"), ("a", 3, "sqlite"), ("b", 2, "postgres")]


def test_values_that_are_wide_are_not_counted() -> None:
    cases = [Case(word, number, base, CROSSED, *[WIDE] * (word == "a")) for word, number, base in product(*LISTS)]
    assert quick(*cases) == [("b", 1, "sqlite"), ("b", 2, "postgres"), ("b", 3, "sqlite")]


def test_a_test_that_is_not_crossed_keeps_all_combinations() -> None:
    assert len(quick(*(Case(*values) for values in product(*LISTS)))) == 12


def test_a_combination_that_is_named_alone_runs() -> None:
    assert quick(Case("b", (1, "one"), "sqlite", CROSSED)) == [("b", 1, "sqlite")]


def thirds(monkeypatch: pytest.MonkeyPatch, cases: list[Case]) -> list[set[str]]:
    """The names of the tests of each third."""
    runs = []
    for third in "012":
        monkeypatch.setenv("TOKENGROVE_TEST_THIRD", third)
        left_out = {item.nodeid for item in other_thirds(cast("list[pytest.Item]", cases))}
        runs.append({case.nodeid for case in cases} - left_out)
    return runs


def test_every_test_is_in_exactly_one_third(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [Case("a", (number, "one"), "sqlite") for number in range(300)]
    runs = thirds(monkeypatch, cases)
    assert sorted(name for run in runs for name in run) == sorted(case.nodeid for case in cases)
    assert all(70 <= len(run) <= 130 for run in runs)


def test_tests_of_one_group_are_in_the_same_third(monkeypatch: pytest.MonkeyPatch) -> None:
    group = pytest.mark.xdist_group("made once")
    cases = [Case("a", (number, "one"), "sqlite", group) for number in range(30)]
    assert sorted(map(len, thirds(monkeypatch, cases))) == [0, 0, 30]


def test_all_tests_run_unless_a_third_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENGROVE_TEST_THIRD", raising=False)
    assert other_thirds(cast("list[pytest.Item]", [Case("a", (1, "one"), "sqlite")])) == []


def test_an_unknown_third_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENGROVE_TEST_THIRD", "3")
    with pytest.raises(pytest.UsageError, match="must be 0, 1 or 2"):
        other_thirds([])
