"""Garbage collections that examine an object twice at most."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from proxy.resources.garbage import collect_everything, freeze_survivors


class Circle:
    """An object in a cycle of its own."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Gives the process its collector back."""
    thresholds, callbacks = gc.get_threshold(), list(gc.callbacks)
    yield
    gc.callbacks[:] = callbacks
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_survives_a_collection_of_the_middle_generation_is_not_examined_again() -> None:
    freeze_survivors()
    held = Circle()
    gc.collect(0)
    assert any(found is held for found in gc.get_objects())
    gc.collect(1)
    assert not any(found is held for found in gc.get_objects())
    freed = weakref.ref(held)
    del held
    gc.collect()
    assert freed() is not None


def test_the_oldest_generation_is_always_empty_so_its_collection_never_waits_for_many_objects() -> None:
    freeze_survivors()
    kept = [Circle() for _ in range(200_000)]  # many times the threshold
    assert len(gc.get_objects(generation=2)) == 0
    assert len(gc.get_objects()) < 3 * gc.get_threshold()[0]
    del kept


def test_young_cycles_are_collected_while_others_are_frozen() -> None:
    freeze_survivors()
    freed = weakref.ref(Circle())
    gc.collect(1)
    assert freed() is None


def test_collecting_everything_frees_frozen_cycles_and_freezes_the_rest_again() -> None:
    freeze_survivors()
    held, dropped = Circle(), Circle()
    gc.collect(1)
    freed = weakref.ref(dropped)
    del dropped
    collect_everything()
    assert freed() is None
    assert not any(found is held for found in gc.get_objects())


def test_a_process_that_does_not_freeze_keeps_what_it_has_frozen_itself() -> None:
    """An app inside of a user's process leaves the collector alone."""
    held = Circle()
    gc.freeze()
    freed = weakref.ref(held)
    del held
    collect_everything()
    assert freed() is not None


def test_freezing_twice_is_freezing_once() -> None:
    freeze_survivors()
    callbacks = list(gc.callbacks)
    freeze_survivors()
    assert gc.callbacks == callbacks
