"""The tree of a session for exports: complete interactions and their parents, without the hashes of live matching.

The tokens of a node are joined from the tokens that its aligned ancestors and the node itself add.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from proxy.types import Ids, Interaction, PlacedImage, ids_of
from tokengrove.reasons import Status


class Linked(Protocol):
    """Any node with an interaction and a parent."""

    @property
    def interaction(self) -> Interaction: ...

    @property
    def parent(self) -> Linked | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """An interaction and its parent. `depth` is the number of turns before it in its conversation."""

    interaction: Interaction
    parent: Branch | None
    depth: int


def build_tree(interactions: Iterable[Interaction]) -> dict[str, Branch]:
    """Build the branches of one session by id, parents first. `interactions` are in order of `seq`."""
    nodes: dict[str, Branch] = {}
    for interaction in interactions:
        if interaction.status is Status.COMPLETE:
            parent = nodes.get(interaction.parent_id) if interaction.parent_id else None
            nodes[interaction.id] = Branch(interaction, parent, parent.depth + 1 if parent is not None else 0)
    return nodes


def token_ids(node: Linked) -> Ids:
    """The exact token ids of a node's prompt and output."""
    pieces: list[Ids] = []
    current: Linked | None = node
    while current is not None:
        interaction = current.interaction
        pieces += (interaction.output_ids, interaction.prompt_suffix)
        current = current.parent if interaction.aligned else None
    pieces.reverse()
    ids = ids_of()
    ids.frombytes(b"".join(pieces))
    return ids


def images_of(node: Linked) -> tuple[PlacedImage, ...]:
    """The images of a node's prompt, in order, with their places in its token ids."""
    pieces: list[tuple[PlacedImage, ...]] = []
    current: Linked | None = node
    while current is not None:
        interaction = current.interaction
        if interaction.images:
            pieces.append(interaction.images)
        current = current.parent if interaction.aligned else None
    return tuple(image for piece in reversed(pieces) for image in piece)
