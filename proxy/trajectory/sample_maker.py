"""Makes the samples of one session from the turns and tokens that a layout assigns to them.

Making a sample has no side effects, so the same sample can be made again (`trajectory.sample_row`). The layout decides
beforehand which tokens a sample trains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.advantages import Comparison
from proxy.trajectory.conversation import conversation_above, message_dict, root, tool_dict
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.paths import Path, joined_above
from proxy.trajectory.sample_row import Labels, PositionsOf, scalar
from proxy.trajectory.scored_session import ScoredSession
from proxy.trajectory.side_source import SideSource
from proxy.trajectory.token_arrays import BoolArray, Placement, fill
from proxy.trajectory.tree import Branch, images_of, token_ids
from proxy.trajectory.tree_sample import TreeSample
from proxy.types import Ids, Interaction, PlacedImage, ids_of
from tokengrove.options.export import Include

Decode = Callable[[Sequence[int]], str]
"""Token ids to text."""


@dataclass(frozen=True, slots=True)
class SampleMaker:
    """Makes samples of a session. `include`: what they contain besides tokens; text requires `decode`.
    `shows_images`: they list the places of images. `positions`: they have the positions of a vision model.
    `side`: the session's side columns.

    Samples of paths and trees have weight 0: the weight depends on the session's other samples.
    """

    scored: ScoredSession
    comparison: Comparison
    include: Set[Include]
    decode: Decode | None
    shows_images: bool = True
    positions: PositionsOf | None = None
    side: SideSource = SideSource()

    def of_turn(self, node: Branch, trained: BoolArray, share: float) -> PathSample:
        """The sample of one turn, its whole prompt and output. Its reward is the return; its weight is `share`, or 0
        if nothing is `trained`, bool [output].
        """
        interaction = node.interaction
        masks = self.side.masks(interaction)
        place = Placement(interaction, 0, interaction.prompt_tokens, _whole(interaction), trained, masks=masks)
        ends = self.scored.ends_through([interaction.id])
        path = Path((node,), token_ids(node), (interaction.prompt_tokens,), (False,), images_of(node))
        sample = self._path_sample(path, (place,), self.scored.returns[interaction.id], ends)
        return sample.with_weight(share if trained.any() else 0.0)

    def of_path(self, path: Path, places: tuple[Placement, ...]) -> PathSample:
        """The sample of a path. Its reward is the score of its session, path or agent."""
        ends = (places[-1].interaction.id,)
        return self._path_sample(path, places, self.scored.scores.of(ends) or 0.0, ends)

    def of_tree(self, nodes: Sequence[Branch], trained: Mapping[str, BoolArray]) -> TreeSample:
        """The sample of these nodes, parents first. `trained`: the tokens to train by turn id, bool [output]."""
        ids, places, offsets = _join(nodes, trained, self.side)
        parents = _parents(nodes)
        names = [node.interaction.id for node in nodes]
        return TreeSample(
            session=self.scored.record,
            placements=places,
            purpose=self.scored.purposes[names[-1]],
            arrays=fill(ids, places),
            offsets=offsets,
            parents=parents,
            positions=_positions(nodes, offsets),
            returns=tuple(self.scored.returns[name] for name in names),
            main=tuple(self.scored.main[name] for name in names),
            weighting=self.comparison.weighting(places, self.scored.ends_through(names)),
            extras=self._extras(places, whole=False),
            images=_moved(nodes, offsets) if self.shows_images else (),
            mrope=None if self.positions is None else _mrope(nodes, self.positions),
            side=partial(self.side.of_tree, nodes, places, offsets, parents),
        )

    def _path_sample(
        self, path: Path, places: tuple[Placement, ...], reward: float, ends: tuple[str, ...]
    ) -> PathSample:
        scored, last = self.scored, places[-1].interaction
        arrays = fill(path.ids, places)
        return PathSample(
            session=scored.record,
            placements=places,
            purpose=scored.purposes[last.id],
            arrays=arrays,
            returns=tuple(scored.returns[place.interaction.id] for place in places),
            main=tuple(scored.main[place.interaction.id] for place in places),
            rewards=scalar(reward),
            raw_rewards=scalar(scored.main[last.id] or 0.0),
            weighting=self.comparison.weighting(places, ends),
            extras=self._extras(places, whole=True),
            text=self._text(path.ids),
            images=path.images if self.shows_images else (),
            positions=self.positions,
            side=partial(self.side.of_path, joined_above(path.nodes[-1]), places, len(path.ids)),
        )

    def _extras(self, places: Sequence[Placement], *, whole: bool) -> tuple[Labels, ...]:
        """The included messages and text of each turn. The first turn of a `whole` sample has its full prompt, with
        the tools."""
        if not self.include:
            return ()
        return tuple(self._extra(place.interaction, whole=whole and place.turn == 0) for place in places)

    def _extra(self, interaction: Interaction, *, whole: bool) -> Labels:
        out: Labels = {}
        if Include.MESSAGES in self.include:
            node = self.scored.nodes[interaction.id]
            above = conversation_above(node) if whole else ()
            messages = (*above, *interaction.new_messages, interaction.output)
            out["messages"] = [message_dict(message) for message in messages]
            if whole:
                out["tools"] = [tool_dict(tool) for tool in root(node).interaction.tools]
        text = self._text(interaction.output_ids)
        return out if text is None else {**out, "text": text}

    def _text(self, ids: Ids) -> str | None:
        """The text of these tokens if it is included."""
        if self.decode is None or Include.TEXT not in self.include:
            return None
        return self.decode(ids.tolist())


def _whole(interaction: Interaction) -> tuple[int, int]:
    return (0, len(interaction.output_ids))


def _join(
    nodes: Sequence[Branch], trained: Mapping[str, BoolArray], side: SideSource
) -> tuple[Ids, tuple[Placement, ...], NDArray[np.int32]]:
    """The tokens that `nodes` add, one node after the other; their placements; and node offsets, int32 [N + 1]."""
    ids, places, offsets = ids_of(), [], [0]
    for turn, node in enumerate(nodes):
        interaction = node.interaction
        ids += interaction.prompt_suffix
        known, masks = trained.get(interaction.id), side.masks(interaction)
        places.append(Placement(interaction, turn, len(ids), _whole(interaction), known, masks=masks))
        ids += interaction.output_ids
        offsets.append(len(ids))
    return ids, tuple(places), np.array(offsets, np.int32)


def _moved(nodes: Sequence[Branch], offsets: NDArray[np.int32]) -> tuple[PlacedImage, ...]:
    """The images of all nodes, with their places in the joined tokens."""
    steps = [
        (node.interaction, int(first) - node.interaction.prefix_length)
        for node, first in zip(nodes, offsets[:-1], strict=True)
    ]
    return tuple(image._replace(start=image.start + shift) for each, shift in steps for image in each.images)


def _mrope(nodes: Sequence[Branch], positions: PositionsOf) -> NDArray[np.int64]:
    """The positions [3, T] of the tokens that nodes add, each in its own sequence."""
    parts = [positions(images_of(node), len(token_ids(node)))[:, node.interaction.prefix_length :] for node in nodes]
    return np.concatenate(parts, axis=1)


def _parents(nodes: Sequence[Branch]) -> NDArray[np.int32]:
    """The index of each node's parent, int32 [N]; -1 for a root and for a node that is not aligned."""
    index = {node.interaction.id: at for at, node in enumerate(nodes)}
    parents = [node.parent if node.interaction.aligned else None for node in nodes]
    return np.array([-1 if parent is None else index[parent.interaction.id] for parent in parents], np.int32)


def _positions(nodes: Sequence[Branch], offsets: NDArray[np.int32]) -> NDArray[np.int32]:
    """The position of each token in its own sequence, int32 [T]: each node continues after its shared prefix."""
    starts = np.array([node.interaction.prefix_length for node in nodes], np.int32)
    return np.arange(offsets[-1], dtype=np.int32) + np.repeat(starts - offsets[:-1], np.diff(offsets))
