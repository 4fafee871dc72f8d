"""Select the turns to train. Turns that are not selected stay in their samples as context."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.lineage import newest_segments
from proxy.trajectory.tree import Branch
from proxy.types import Interaction
from tokengrove.options.export import TrainedLogprobs, TrainSelection, TurnSelection
from tokengrove.options.model import RouteKind
from tokengrove.reasons import LogprobsOf, Untrained


def chosen_turns(nodes: Mapping[str, Branch], purposes: Mapping[str, str], train: TrainSelection) -> frozenset[str]:
    """Ids of the interactions of trained routes that `train` selects, marked trainable or not. `purposes` are by id."""
    continued = {id(node.parent) for node in nodes.values()}
    turns = [node.interaction for node in nodes.values()]
    newest = None if train.max_segments is None else newest_segments(turns, train.max_segments)
    return frozenset(
        name
        for name, node in nodes.items()
        if node.interaction.route_kind is RouteKind.POLICY
        and (newest is None or name in newest)
        and name not in train.exclude
        and (train.purposes is None or purposes[name] in train.purposes)
        and (train.agents is None or node.interaction.agent in train.agents)
        and _in_turns(node, id(node) in continued, train.turns)
    )


def not_trained(
    interactions: Iterable[Interaction],
    selected: Collection[str],
    chosen: Collection[str],
    *,
    unfinished: bool,
    train: TrainSelection,
    routes: Collection[str] | None = None,
) -> dict[str, Untrained]:
    """The turns that are not trained, by id, and the first reason for each.

    `selected`: the ids that the filter keeps. `chosen`: the ids that `train` selects. `unfinished`: nothing of the
    session is trained. `routes`: the routes that the export names; None: all that are trained.
    """
    found: dict[str, Untrained] = {}
    for interaction in interactions:
        name = interaction.id
        if interaction.route_kind is not RouteKind.POLICY:
            found[name] = Untrained.FROZEN
        elif routes is not None and interaction.route not in routes:
            found[name] = Untrained.ROUTE
        elif name not in selected:
            found[name] = Untrained.FILTER
        elif not interaction.has_logprobs:
            found[name] = Untrained.NO_LOGPROBS
        elif unfinished:
            found[name] = Untrained.UNFINISHED
        elif name not in chosen:
            found[name] = Untrained.TRAIN
        elif not interaction.trainable:
            found[name] = Untrained.MARK
        elif train.logprobs is TrainedLogprobs.RULE and interaction.logprobs_of is not LogprobsOf.RULE:
            found[name] = Untrained.LOGPROBS
        elif interaction.grammar and not train.constrained:
            found[name] = Untrained.GRAMMAR
    return found


def marked(interaction: Interaction) -> NDArray[np.bool_]:
    """The sampled tokens that the marks allow to train, bool [output]: the tokens in spans; without spans, all."""
    length = len(interaction.output_ids)
    allowed = np.zeros(length, bool)
    for first, end in interaction.spans or ((0, length),):
        allowed[first:end] = interaction.trainable
    return allowed


def _in_turns(node: Branch, continued: bool, turns: TurnSelection | frozenset[int]) -> bool:
    if turns is TurnSelection.LAST:
        return not continued
    return turns is TurnSelection.ALL or node.depth in turns
