"""The path from a root to a leaf, and the tokens of its sample. Only aligned nodes are joined token by token.

If a child is not aligned with its parent, its prompt was rendered to other tokens (drift). Policy `fork` starts a new
sample at the child. Policy `mask` keeps one sample with the child's own prompt: outputs of older turns are searched for
in that prompt, together with the end of their generation prompt. An output that is found token by token is trained
there; the others are context. If an output occurs more than once, the occurrence with the most equal tokens before it
wins.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from proxy.trajectory.tree import Branch, images_of, token_ids
from proxy.types import Ids, PlacedImage
from tokengrove.options.export import Drift

# An older output is searched for together with this many tokens of the prompt before it. They contain the assistant's
# header; without them, a short output would be found in a user's text.
_ANCHOR = 3


@dataclass(frozen=True, slots=True)
class Path:
    """The nodes of a sample, oldest first, and its token ids.

    `starts[k]`: the index in `ids` at which the output of node k begins; None if `ids` do not contain it. `drifted[k]`:
    whether the tokens before that index differ from the prompt of the output. `images`: the images of the last node's
    prompt, in order.
    """

    nodes: tuple[Branch, ...]
    ids: Ids
    starts: tuple[int | None, ...]
    drifted: tuple[bool, ...]
    images: tuple[PlacedImage, ...] = ()


def leaves(nodes: Sequence[Branch], selected: Collection[str], drift: Drift) -> list[Branch]:
    """The selected nodes that no selected node continues, in order of `seq`."""
    continued = {
        id(node.parent)
        for node in nodes
        if node.interaction.id in selected and (node.interaction.aligned or drift is Drift.MASK)
    }
    found = [node for node in nodes if node.interaction.id in selected and id(node) not in continued]
    return sorted(found, key=lambda node: node.interaction.seq)


def path_to(leaf: Branch, drift: Drift) -> Path:
    """The path that ends with `leaf`."""
    joined = _joined(leaf)
    starts: list[int | None] = [node.interaction.prompt_tokens for node in joined]
    drifted = [False] * len(joined)
    if drift is Drift.MASK:
        above = _ancestors(joined[-1])
        prompt = _prompt(joined[-1])
        found = list(reversed(_find_again(above[::-1], prompt)))
        drifted += [start is None or prompt[:start] != _prompt(node) for node, start in zip(above, found, strict=True)]
        starts += found
        joined += above
    order = (tuple(reversed(joined)), token_ids(leaf), tuple(reversed(starts)), tuple(reversed(drifted)))
    return Path(*order, images_of(leaf))


def _prompt(node: Branch) -> Ids:
    return token_ids(node)[: node.interaction.prompt_tokens]


def path_nodes(leaf: Branch, drift: Drift) -> list[Branch]:
    """The nodes of the path that ends with `leaf`, the last one first. Their tokens are not read."""
    return [leaf, *_ancestors(leaf)] if drift is Drift.MASK else _joined(leaf)


def joined_above(leaf: Branch) -> list[Branch]:
    """A node and the ancestors that its prompt begins with token by token, oldest first."""
    return _joined(leaf)[::-1]


def _joined(leaf: Branch) -> list[Branch]:
    """A node and the ancestors that its prompt begins with token by token, nearest first."""
    joined = [leaf]
    while joined[-1].interaction.aligned and joined[-1].parent is not None:
        joined.append(joined[-1].parent)
    return joined


def _ancestors(node: Branch) -> list[Branch]:
    """The ancestors of a node, nearest first."""
    found: list[Branch] = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def _find_again(nodes: Sequence[Branch], ids: Ids) -> list[int | None]:
    """Find the outputs of `nodes`, oldest first, in `ids`, each after the one before; None for an output not found."""
    starts: list[int | None] = []
    after = 0
    for node in nodes:
        output = node.interaction.output_ids
        prompt = _prompt(node)
        anchor = prompt[-_ANCHOR:]
        found = [at + len(anchor) for at in find_all(ids, anchor + output, max(after - len(anchor), 0))]
        common = [_common_end(ids[:at], prompt) for at in found]
        start = found[common.index(max(common))] if found else None
        starts.append(start)
        if start is not None:
            after = start + len(output)
    return starts


def _common_end(first: Ids, second: Ids) -> int:
    """The length of the longest common suffix."""
    length = min(len(first), len(second))
    if not length:
        return 0
    same = np.asarray(first, np.int32)[-length:] == np.asarray(second, np.int32)[-length:]
    return length if same.all() else int(np.argmin(same[::-1]))


def find_all(ids: Ids, wanted: Ids, start: int = 0) -> Iterator[int]:
    """Every index from `start` at which `wanted` occurs in `ids`, in order."""
    width = ids.itemsize
    haystack, needle = ids.tobytes(), wanted.tobytes()
    at = haystack.find(needle, start * width)
    while at >= 0:
        if at % width == 0:
            yield at // width
        at = haystack.find(needle, at + 1)
