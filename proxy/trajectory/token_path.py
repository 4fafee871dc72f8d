"""The tokens of a turn's prompt and output, and the turns that added them.

A path from the root to a turn is divided into sections: a new section begins where a prompt does not begin with the
tokens of the turn above it (drift). The tokens of a turn are the tokens of its own section. Under `drift: mask`,
outputs of earlier sections count where they are found again in these tokens, as in exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from proxy.trajectory.ledger import equal_runs
from proxy.trajectory.paths import path_to
from proxy.trajectory.session_samples import SessionSamples
from proxy.trajectory.token_arrays import IntArray
from proxy.trajectory.tree import Branch, token_ids
from proxy.types import Ids, Interaction, PlacedImage
from tokengrove.options.export import Drift, Layout
from tokengrove.reasons import Explained, Status, TokenState

_SHOWN = 16


class PartKind(StrEnum):
    """What a turn added: tokens of its prompt, or its output."""

    PROMPT = "prompt"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class PathPart:
    """The tokens [start, end) of a path, added by `interaction`."""

    interaction: Interaction
    kind: PartKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Break:
    """Where a section differs from the section above it: the index of the first token that differs.

    `sent`: the ids from there on in this section. `recorded`: the ids in the section above. At most 16 of each.
    """

    index: int
    sent: Sequence[int]
    recorded: Sequence[int]


@dataclass(frozen=True, slots=True)
class Section:
    """Turns that are joined token by token, oldest first. `tokens`: the length of their prompts and outputs. `differs`:
    how the first prompt differs from the section above; None for the first section."""

    interactions: tuple[Interaction, ...]
    tokens: int
    differs: Break | None


@dataclass(frozen=True, slots=True)
class TokenPath:
    """`ids`: the tokens of a turn's prompt and output. `parts`: the parts of `ids`, in order and without gaps.
    `sections`: the sections from the root on; the last has these tokens. `lost`: the turns of the path whose outputs
    are not in `ids`."""

    ids: Ids
    parts: tuple[PathPart, ...]
    sections: tuple[Section, ...]
    lost: tuple[Interaction, ...]


def token_path(node: Branch, drift: Drift) -> TokenPath:
    """The tokens of a turn, complete or not."""
    path = path_to(node, drift)
    placed = [
        (each.interaction, start) for each, start in zip(path.nodes, path.starts, strict=True) if start is not None
    ]
    sections = _sections(node)
    here = {interaction.id for interaction, _ in placed}
    above = [each for section in sections for each in section.interactions if each.id not in here]
    return TokenPath(path.ids, tuple(_parts(placed, node)), tuple(sections), tuple(above))


def _parts(placed: Sequence[tuple[Interaction, int]], node: Branch) -> Iterator[PathPart]:
    """Outputs at their places. The tokens before each belong to the prompt of the turn that added them."""
    opener = _first_of_section(node).interaction
    opener_end, at = opener.prompt_tokens, 0
    for interaction, start in placed:
        if at < start:
            yield PathPart(opener if start <= opener_end else interaction, PartKind.PROMPT, at, start)
        at = start + len(interaction.output_ids)
        if start < at:
            yield PathPart(interaction, PartKind.OUTPUT, start, at)


def _first_of_section(node: Branch) -> Branch:
    while node.interaction.aligned and node.parent is not None:
        node = node.parent
    return node


def _sections(node: Branch) -> list[Section]:
    """The sections from the root on."""
    found: list[Section] = []
    last: Branch | None = node
    while last is not None:
        first = _first_of_section(last)
        found.append(Section(_joined(last, first), _length(last), _break(first)))
        last = first.parent
    return found[::-1]


def _joined(node: Branch, first: Branch) -> tuple[Interaction, ...]:
    found, current = [node.interaction], node
    while current is not first and current.parent is not None:
        current = current.parent
        found.append(current.interaction)
    return tuple(reversed(found))


def _length(node: Branch) -> int:
    return node.interaction.prompt_tokens + len(node.interaction.output_ids)


def _break(first: Branch) -> Break | None:
    """How the first prompt of a section differs from the tokens of the turn above it."""
    if first.parent is None:
        return None
    sent = np.asarray(token_ids(first)[: first.interaction.prompt_tokens], np.int32)
    recorded = np.asarray(token_ids(first.parent), np.int32)
    length = min(len(sent), len(recorded))
    unequal = np.flatnonzero(sent[:length] != recorded[:length])
    index = int(unequal[0]) if len(unequal) else length
    return Break(index, sent[index : index + _SHOWN].tolist(), recorded[index : index + _SHOWN].tolist())


@dataclass(frozen=True, slots=True)
class StateRun:
    """Tokens [start, end) of a path with one state: a `TokenState`, an `Untrained`, or the `Status` of a turn that is
    not exported. `sample`: the id of the last turn of the sample that trains them."""

    start: int
    end: int
    state: Explained
    sample: str | None = None


class TokenStates:
    """The token states of one session under an export. `session_samples`: the session's part of the export."""

    def __init__(self, session_samples: SessionSamples, layout: Layout) -> None:
        self._ledger = session_samples.ledger
        # In layout individual, a turn is trained in its own sample. Rows are made when they are read, so none is read.
        rows = [] if layout is Layout.INDIVIDUAL else session_samples.rows
        self._own = layout is Layout.INDIVIDUAL
        self._samples = [row.placements[-1].interaction.id for row in rows]
        self._where: dict[str, IntArray] = {}
        for number, placed in ((number, placed) for number, row in enumerate(rows) for placed in row.placements):
            if placed.trained is not None and placed.start is not None:
                tokens = self._where.setdefault(placed.interaction.id, np.full(len(placed.trained), -1, np.int32))
                tokens[placed.trained] = number

    def of(self, parts: Sequence[PathPart], images: Sequence[PlacedImage] = ()) -> list[StateRun]:
        """The states of all tokens of a path, in order and without gaps. `images`: the path's images, in order."""
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
        """The runs of trained tokens in [first, end) of an output, each with the sample that trains it."""
        if self._own:
            yield first, end, name
            return
        where = self._where[name][first:end]
        for one, other in equal_runs(where):
            yield first + one, first + other, self._samples[int(where[one])]


def _context(part: PathPart, images: Sequence[PlacedImage]) -> Iterator[StateRun]:
    """The states of a part of a prompt: its images, and the context between them."""
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
