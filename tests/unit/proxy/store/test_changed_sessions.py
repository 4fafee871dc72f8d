"""Which sessions changed, for readers who come again and again."""

from __future__ import annotations

from proxy.store.changed_sessions import MOST, REST_S, ChangedSessions


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_kept_of_changes_that_nobody_asks_for() -> None:
    changed = ChangedSessions()
    changed.note("a")
    assert not changed._by_id
    begin = changed.since(None)
    assert (begin.ids, begin.all) == ((), False)


def test_each_reader_gets_what_changed_since_he_asked_once_each() -> None:
    changed = ChangedSessions()
    mine = changed.since(None).place
    changed.note("a")
    yours = changed.since(None).place
    for name in ("b", "a", "b"):
        changed.note(name)
    assert changed.since(mine).ids == ("a", "b")
    assert changed.since(yours).ids == ("a", "b")
    assert changed.since(changed.since(mine).place).ids == ()


def test_what_is_remembered_is_bounded_and_who_missed_some_is_told() -> None:
    changed = ChangedSessions()
    behind = changed.since(None).place
    for number in range(MOST + 5):
        changed.note(str(number))
    assert len(changed._by_id) == MOST
    told = changed.since(behind)
    assert (told.ids, told.all) == ((), True)
    changed.note("next")
    assert changed.since(told.place).ids == ("next",)


def test_the_memory_rests_without_readers_and_one_who_comes_back_is_told() -> None:
    clock = Clock()
    changed = ChangedSessions(clock)
    place = changed.since(None).place
    changed.note("a")
    clock.now += REST_S + 1
    changed.note("b")
    changed.note("c")
    assert not changed._by_id
    told = changed.since(place)
    assert told.all
    changed.note("d")
    assert changed.since(told.place).ids == ("d",)


def test_a_place_of_another_process_is_no_place_here() -> None:
    place = ChangedSessions().since(None).place
    changed = ChangedSessions()
    changed.since(None)
    assert changed.since(place).all


def test_a_session_that_changes_again_is_told_again() -> None:
    changes = ChangedSessions(lambda: 0.0)
    place = changes.since(None).place
    for name in ("a", "b"):
        changes.note(name)
    between = changes.since(place)
    changes.note("a")
    assert changes.since(between.place).ids == ("a",)
    assert changes.since(place).ids == ("b", "a")
