"""What becomes of each token of a path in an export: context, trained, or why not, out of the ledger that exports count
by. So the counts of a session's outputs are those of its entry in the export.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from proxy.trajectory.laid import Laid
from proxy.trajectory.ledger import equal_runs
from proxy.trajectory.token_arrays import IntArray
from proxy.trajectory.token_path import PartKind, PathPart
from proxy.types import PlacedImage
from tokengrove.options.export import Layout
from tokengrove.reasons import Explained, Status, TokenState


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens [start, end) of a path with one state: a `TokenState`, an `Untrained`, or the `Status` of a turn that no
    export has. `sample`: the id of the turn with which the sample ends that trains them."""

    start: int
    end: int
    state: Explained
    sample: str | None = None


class TokenStates:
    """The states under one export of a session. `laid`: that export, in `layout`."""

    def __init__(self, laid: Laid, layout: Layout) -> None:
        self._ledger = laid.ledger
        # In layout individual a turn is trained in its own sample; its rows are made when they are read.
        rows = [] if layout is Layout.INDIVIDUAL else laid.rows
        self._own = layout is Layout.INDIVIDUAL
        self._samples = [row.placements[-1].interaction.id for row in rows]
        self._where: dict[str, IntArray] = {}
        for number, placed in ((number, placed) for number, row in enumerate(rows) for placed in row.placements):
            if placed.trained is not None and placed.start is not None:
                tokens = self._where.setdefault(placed.interaction.id, np.full(len(placed.trained), -1, np.int32))
                tokens[placed.trained] = number

    def of(self, parts: Sequence[PathPart], images: Sequence[PlacedImage] = ()) -> list[StateRun]:
        """The states of all tokens of a path, in order and without gaps. `images`: of the path, in order."""
        runs: list[StateRun] = []
        for part in parts:
            if part.kind is PartKind.PROMPT:
                runs += _context(part, images)
            elif part.interaction.status is not Status.COMPLETE:
                runs.append(StateRun(part.start, part.end, part.interaction.status))
            else:
                runs += self._output(part.interaction.id, part.start)
        return runs

    def _output(self, name: str, start: int) -> Iterator[StateRun]:
        for first, end, reason in self._ledger.runs(name):
            if reason is not None:
                yield StateRun(start + first, start + end, reason)
                continue
            for one, other, sample in self._trained(name, first, end):
                yield StateRun(start + one, start + other, TokenState.TRAINED, sample)

    def _trained(self, name: str, first: int, end: int) -> Iterator[tuple[int, int, str]]:
        """The tokens [first, end) of an output, which are trained, by the sample that trains them."""
        if self._own:
            yield first, end, name
            return
        where = self._where[name][first:end]
        for one, other in equal_runs(where):
            yield first + one, first + other, self._samples[int(where[one])]


def _context(part: PathPart, images: Sequence[PlacedImage]) -> Iterator[StateRun]:
    """The tokens of a part of a prompt: those of its images, and what is between them."""
    at = part.start
    for image in images:
        if not part.start <= image.start < part.end:
            continue
        if at < image.start:
            yield StateRun(at, image.start, TokenState.CONTEXT)
        at = image.start + image.length
        yield StateRun(image.start, at, TokenState.IMAGE)
    if at < part.end:
        yield StateRun(at, part.end, TokenState.CONTEXT)
