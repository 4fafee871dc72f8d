"""The states of a pause, and which of them the gate, a trainer and other workers see."""

from __future__ import annotations

from proxy.engine.interface import PauseMode
from proxy.engine.pause_state import PausedBy, PauseState

ABORT, DRAIN = PauseMode.ABORT, PauseMode.DRAIN


def seen(state: PauseState) -> tuple[bool, PauseMode | None, PauseMode | None, PauseMode | None]:
    """Whether requests wait; the pause in force; the one of workers that start; the one that outlives the leader."""
    return state.held, state.paused, state.shared, state.lasting


def test_a_pause_is_shared_before_it_is_in_force_and_no_longer_as_it_ends() -> None:
    state = PauseState()
    assert seen(state) == (False, None, None, None)
    state.announce(ABORT)
    assert seen(state) == (False, None, ABORT, ABORT)
    state.close(ABORT)
    assert seen(state) == (True, None, ABORT, ABORT)
    state.enter(ABORT)
    assert seen(state) == (True, ABORT, ABORT, ABORT)
    state.ending = True
    assert seen(state) == (True, ABORT, None, None)
    state.end()
    assert seen(state) == (False, None, None, None)


def test_a_pause_that_ends_before_it_is_in_force_leaves_nothing() -> None:
    state = PauseState()
    state.by = PausedBy.UPDATE
    state.close(DRAIN)
    state.ending = True
    state.end()
    assert seen(state) == (False, None, None, None) and state.by is PausedBy.TRAINER and not state.ending


def test_a_pause_in_force_stays_in_force_while_it_is_begun_again() -> None:
    state = PauseState()
    state.close(ABORT)
    state.enter(ABORT)
    state.close(DRAIN)
    assert seen(state) == (True, ABORT, ABORT, ABORT)
    state.enter(DRAIN)
    assert seen(state) == (True, DRAIN, DRAIN, DRAIN)


def test_a_pause_of_a_weight_update_is_shared_with_workers_that_start_only() -> None:
    state = PauseState()
    state.by = PausedBy.UPDATE
    state.close(ABORT)
    state.enter(ABORT)
    assert (state.shared, state.lasting) == (ABORT, None)


def test_memory_is_released_by_the_pause_that_was_begun_for_it() -> None:
    state = PauseState()
    state.close(ABORT)
    state.enter(ABORT)
    state.release(frozenset({"weights"}), begun=False)
    assert state.by is PausedBy.TRAINER
    state.release(frozenset({"kv_cache"}), begun=True)
    state.release(frozenset({"cuda_graph"}), begun=False)
    assert state.by is PausedBy.MEMORY and state.released == {"weights", "kv_cache", "cuda_graph"}
    state.restore(frozenset({"weights", "kv_cache"}))
    assert state.by is PausedBy.MEMORY and state.released == {"cuda_graph"}
