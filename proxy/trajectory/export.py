"""Samples of one session. In layout concat every selected sampled token carries mask 1 in exactly one sample.

Only nodes proven aligned are joined with their parent. Exporting never changes what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from proxy.trajectory.cache import InteractionCache, Node
from proxy.trajectory.rewards import compute_returns
from proxy.trajectory.tensors import FloatArray, Piece, TokenArrays, join
from proxy.types import Credit, Interaction, SessionRecord, Status


class Layout(StrEnum):
    INDIVIDUAL = "individual"
    CONCAT = "concat"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export; None takes the session's own discount and credit rule."""

    layout: Layout = Layout.INDIVIDUAL
    discount: float | None = None
    credit: Credit | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample: `interactions` in order (one for layout individual), their token arrays and returns."""

    session: SessionRecord
    interactions: tuple[Interaction, ...]
    arrays: TokenArrays
    returns: tuple[float, ...]
    rewards: FloatArray
    raw_rewards: FloatArray

    @property
    def last(self) -> Interaction:
        """The interaction that the sample ends with."""
        return self.interactions[-1]

    def to_json(self) -> dict[str, Any]:
        """The sample as a dict whose arrays are numpy: int32 and float32 [L], attention_mask bool [L], rewards [1]."""
        last, arrays = self.last, self.arrays
        return {
            "interaction_id": last.id,
            "interaction_ids": [interaction.id for interaction in self.interactions],
            "session_id": self.session.session_id,
            "group_id": self.session.group_id,
            "task_id": self.session.task_id,
            "purpose": last.purpose,
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "sampling": last.sampling.to_json(),
            "recomputable": all(recomputable(interaction) for interaction in self.interactions),
            "turns": [self._turn(index) for index in range(len(self.interactions))],
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(len(arrays.input_ids), bool),
            "rewards": self.rewards,
            "raw_rewards": self.raw_rewards,
        }

    def _turn(self, index: int) -> dict[str, Any]:
        interaction = self.interactions[index]
        return {
            "interaction_id": interaction.id,
            "sampling": interaction.sampling.to_json(),
            "reward": interaction.reward,
            "return": self.returns[index],
            "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
            "state_hash": interaction.state_hash,
            "recomputable": recomputable(interaction),
            "span": list(self.arrays.spans[index]),
        }


def recomputable(interaction: Interaction) -> bool:
    """Whether a trainer gets the same logprobs from the ids and the temperature alone."""
    sampling = interaction.sampling
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    return not (penalised or sampling.logit_bias or interaction.notes.get("grammar"))


def export_session(record: SessionRecord, interactions: Sequence[Interaction], options: ExportOptions) -> list[Sample]:
    """The samples of one session, by their last interaction. `interactions` are all of it, in order of `seq`."""
    discount = record.discount if options.discount is None else options.discount
    returns = compute_returns(interactions, discount, options.credit or record.credit)
    cache = InteractionCache(interactions)
    nodes = list(cache.nodes.values())
    if options.layout is Layout.INDIVIDUAL:
        return [_individual(record, cache, node, returns) for node in nodes]
    return _concat(record, nodes, returns)


def _individual(record: SessionRecord, cache: InteractionCache, node: Node, returns: Mapping[str, float]) -> Sample:
    interaction = node.interaction
    prompt = cache.token_ids(node)[: interaction.prompt_tokens]
    arrays = join([Piece(prompt, interaction, 0, interaction.trainable)])
    value = returns[interaction.id]
    return Sample(record, (interaction,), arrays, (value,), _scalar(value), _scalar(interaction.reward or 0.0))


def _concat(record: SessionRecord, nodes: Sequence[Node], returns: Mapping[str, float]) -> list[Sample]:
    """One sample a leaf, leaves by rising `seq`: the first whose path holds a node trains it."""
    samples: list[Sample] = []
    trained: set[str] = set()
    for leaf in sorted(_leaves(nodes), key=lambda node: node.interaction.seq):
        path = aligned_path(leaf)
        pieces = [
            Piece(node.interaction.prompt_suffix, node.interaction, at, _trains(node, trained))
            for at, node in enumerate(path)
        ]
        trained.update(node.interaction.id for node in path)
        interactions = tuple(node.interaction for node in path)
        score = sum(interaction.reward or 0.0 for interaction in interactions)
        values = tuple(returns[interaction.id] for interaction in interactions)
        samples.append(
            Sample(record, interactions, join(pieces), values, _scalar(score), _scalar(leaf.interaction.reward or 0.0))
        )
    return samples


def _trains(node: Node, trained: set[str]) -> bool:
    return node.interaction.trainable and node.interaction.id not in trained


def _leaves(nodes: Sequence[Node]) -> list[Node]:
    return [node for node in nodes if not any(child.interaction.aligned for child in node.children)]


def aligned_path(leaf: Node) -> list[Node]:
    """From the first node of the leaf's aligned chain to the leaf."""
    path = [leaf]
    while path[-1].interaction.aligned and path[-1].parent is not None:
        path.append(path[-1].parent)
    return path[::-1]


def _scalar(value: float) -> FloatArray:
    return np.array([value], np.float32)


def certificate(record: SessionRecord, interactions: Sequence[Interaction], begun_not_ended: int = 0) -> dict[str, Any]:
    """A session's entry of the export: what there is, and whether anything is missing."""
    counts = {status: sum(i.status is status for i in interactions) for status in Status}
    complete = [i for i in interactions if i.status is Status.COMPLETE]
    reasons: dict[str, int] = {}
    for interaction in complete:
        reasons[interaction.reason.value] = reasons.get(interaction.reason.value, 0) + 1
    lost = begun_not_ended + counts[Status.FAILED] + counts[Status.ABORTED]
    return {
        "status": record.status.value,
        "complete": lost == 0,
        "begun_not_ended": begun_not_ended,
        "aborted": counts[Status.ABORTED],
        "superseded": counts[Status.SUPERSEDED],
        "failed": counts[Status.FAILED],
        "reasons": reasons,
        "unaligned": sum(i.parent_id is not None and not i.aligned for i in complete),
        "rewarded": any(i.reward is not None for i in complete),
        "outcome": record.outcome.value if record.outcome else None,
        "metrics": dict(record.metrics),
    }
