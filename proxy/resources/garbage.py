"""Garbage collection that looks at each object twice at most, however many sessions are in memory.

Sessions, turns and connections have no reference cycles, so they are freed without the collector. What survives a
collection of the middle generation is frozen: no later collection examines it, until `collect_everything`. So the
pauses depend on the objects made since the last collection, and not on those that are there.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping

# Every second collection is one of the middle generation, which also examines what the one before has left: at most
# 10,000 objects, in about 7 ms. The default thresholds collect too often for a server that creates almost no cycles.
_THRESHOLDS = 5_000, 0, 60
_MIDDLE = 1


def freeze_survivors() -> None:
    """Collect everything now, and from now on freeze what survives a collection of the middle generation."""
    gc.set_threshold(*_THRESHOLDS)
    if _freeze not in gc.callbacks:
        gc.callbacks.append(_freeze)
    gc.collect()


def collect_everything() -> None:
    """Collect frozen objects also: those in cycles that were in use when they were frozen. Takes 0.1 s or more."""
    if _freeze in gc.callbacks:  # else the freezing is not ours
        gc.unfreeze()
    gc.collect()


def _freeze(phase: str, info: Mapping[str, int]) -> None:
    if phase == "stop" and info["generation"] >= _MIDDLE:
        gc.freeze()
