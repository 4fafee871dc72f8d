"""What an export sees of a session: complete interactions and their parents, without the hashes of live matching.

The tokens of a node are put together from what each node adds, through aligned links only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from proxy.types import Ids, Interaction, Status, ids_of


class Linked(Protocol):
    """Any node that knows its interaction and its parent."""

    @property
    def interaction(self) -> Interaction: ...

    @property
    def parent(self) -> Linked | None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """An interaction and what it continues. `depth` counts the turns before it in its conversation."""

    interaction: Interaction
    parent: Branch | None
    depth: int


def grow(interactions: Iterable[Interaction]) -> dict[str, Branch]:
    """The complete interactions by id, parents first. `interactions` are of one session, in order of `seq`."""
    nodes: dict[str, Branch] = {}
    for interaction in interactions:
        if interaction.status is Status.COMPLETE:
            parent = nodes.get(interaction.parent_id) if interaction.parent_id else None
            nodes[interaction.id] = Branch(interaction, parent, parent.depth + 1 if parent is not None else 0)
    return nodes


def token_ids(node: Linked) -> Ids:
    """The exact ids of a node's prompt and output."""
    pieces: list[Ids] = []
    current: Linked | None = node
    while current is not None:
        pieces += (current.interaction.output_ids, current.interaction.prompt_suffix)
        current = current.parent if current.interaction.aligned else None
    out = ids_of()
    for piece in reversed(pieces):
        out += piece
    return out
