"""The tokens of a turn's prompt and output, and which turn brought which of them.

A path from the root to a turn is cut into sections: where a prompt does not begin with the tokens of the turn above it
(drift), a new section begins. The tokens of a turn are those of its own section. Under `drift: mask`, outputs of the
sections above count where they are found again in them, as in exports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from proxy.trajectory.paths import path_to
from proxy.trajectory.tree import Branch, token_ids
from proxy.types import Ids, Interaction
from tokengrove.options.export import Drift

_SHOWN = 16


class PartKind(StrEnum):
    """What a turn brought: tokens of its prompt, or its output."""

    PROMPT = "prompt"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class PathPart:
    """The tokens [start, end) of a path, which `interaction` brought."""

    interaction: Interaction
    kind: PartKind
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Break:
    """Where a section begins otherwise than the one above it ended: the index of the first token that differs.

    `sent` are the ids from there on in this section, `recorded` those of the section above; at most 16 of each.
    """

    index: int
    sent: Sequence[int]
    recorded: Sequence[int]


@dataclass(frozen=True, slots=True)
class Section:
    """Turns whose tokens are joined, oldest first, the length of their prompts and outputs in tokens, and how the first
    of these prompts differs from the section above."""

    interactions: tuple[Interaction, ...]
    tokens: int
    differs: Break | None


@dataclass(frozen=True, slots=True)
class TokenPath:
    """`ids` of a turn's prompt and output; their `parts`, in order and without gaps; the `sections` from the root on,
    of which the last has these tokens; `lost`: the turns of the path whose outputs are not in these tokens."""

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
    """Outputs where they are placed; the tokens before each belong to the prompt of the turn that brought them."""
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
