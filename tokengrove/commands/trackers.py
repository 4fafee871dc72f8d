"""`tokengrove watch --to`: writes the figures of training runs, step by step, to an experiment tracker.

A step of a run is written once, when a later one has begun or the command ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from importlib import import_module
from typing import Any, Protocol

from tokengrove.errors import ConfigurationError, how_to_get
from tokengrove.texts import printable

_NOT_WRITTEN = ("run", "step", "worst")
_UNNAMED = "unnamed"
_STEP = "rollout/step"


class Tracker(StrEnum):
    """The trackers."""

    WANDB = "wandb"
    TRACKIO = "trackio"


class TrackedRun(Protocol):
    """A run of a tracker."""

    last: int | None
    """The last step that it has already, if the tracker tells it."""

    def log(self, step: int, figures: Mapping[str, float]) -> None: ...

    def finish(self) -> None: ...


OpenRun = Callable[[str], TrackedRun]


class StepLog:
    """Writes steps. `open_run` opens a run of the tracker by its name."""

    def __init__(self, open_run: OpenRun) -> None:
        self._open = open_run
        self._runs: dict[str, TrackedRun] = {}
        self._last: dict[str, int] = {}

    def write(self, figures: Iterable[Mapping[str, Any]], *, final: bool) -> Iterator[str]:
        """Write the steps that are over, or with `final` all that were not written; yield a line for each."""
        by_run: dict[str, list[Mapping[str, Any]]] = {}
        left = 0
        for entry in figures:
            if not _is_step(entry["step"]):
                left += entry["sessions"]
                continue
            by_run.setdefault(_UNNAMED if entry["run"] is None else str(entry["run"]), []).append(entry)
        for name, entries in by_run.items():
            entries.sort(key=lambda entry: entry["step"])
            for entry in entries if final else entries[:-1]:
                if self._write(name, entry):
                    yield f"{printable(name)} step {entry['step']}: {entry['sessions']} sessions"
        if final and left:
            yield f"not written: {left} sessions without a whole number as step"

    def _write(self, name: str, entry: Mapping[str, Any]) -> bool:
        step = int(entry["step"])
        if step <= self._last.get(name, -sys.maxsize):
            return False
        if name not in self._runs:
            self._runs[name] = self._open(name)
        last = self._runs[name].last
        self._last[name] = step
        if last is not None and step <= last:
            return False
        told = {key: value for key, value in entry.items() if key not in _NOT_WRITTEN and value is not None}
        self._runs[name].log(step, {f"rollout/{key}": float(value) for key, value in told.items()})
        return True

    def finish(self) -> None:
        """End all runs, so that everything is sent."""
        for run in self._runs.values():
            run.finish()


def _is_step(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, float) and value.is_integer())


def open_runs(tracker: Tracker, project: str) -> OpenRun:
    """Return what opens a run of a project. Raises ConfigurationError if the tracker's package is missing."""
    try:
        module = import_module(tracker.value)
    except ModuleNotFoundError as error:
        if error.name != tracker.value:
            raise
        needed = how_to_get(f"tokengrove[{tracker.value}]")
        raise ConfigurationError(f"--to {tracker.value} needs the package {tracker.value}: {needed}") from None
    make: Callable[[Any, str, str], TrackedRun] = _WandbRun if tracker is Tracker.WANDB else _TrackioRun
    return lambda name: make(module, project, name)


class _WandbRun:
    """A run of W&B, which is resumed behind its last step. The x axis of its charts is the step of the training."""

    def __init__(self, wandb: Any, project: str, name: str) -> None:
        self._run = wandb.init(project=project, name=name, id=_wandb_id(name), resume="allow", reinit="create_new")
        self._run.define_metric("rollout/*", step_metric=_STEP)
        last = self._run.summary.get(_STEP)
        self.last = int(last) if isinstance(last, int | float) else None

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, _STEP: step})

    def finish(self) -> None:
        self._run.finish()


def _wandb_id(name: str) -> str:
    """The id of a run: W&B refuses some characters."""
    return "".join(each if each.isalnum() or each in "-_." else "-" for each in name)[:64]


class _TrackioRun:
    """A run of trackio, which is resumed."""

    last: int | None = None

    def __init__(self, trackio: Any, project: str, name: str) -> None:
        self._run = trackio.init(project=project, name=name, resume="allow", embed=False)

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self) -> None:
        self._run.finish()
