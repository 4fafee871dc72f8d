"""Samples of one session. In layout concat every selected sampled token carries mask 1 in exactly one sample.

(With drift policy `mask`, one that stands nowhere as sampled is trained nowhere, and counted.) Exporting never changes
what is stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from proxy.trajectory.cache import InteractionCache, Node
from proxy.trajectory.paths import Drift, leaves, path_to
from proxy.trajectory.purpose import derive
from proxy.trajectory.rewards import compute_returns
from proxy.trajectory.tensors import FloatArray, Placement, TokenArrays, fill
from proxy.types import Credit, Interaction, SessionRecord, Status


class Layout(StrEnum):
    INDIVIDUAL = "individual"
    CONCAT = "concat"


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """How to export. `discount` and `credit` None: the session's own. `purposes` and `agents` None: all of them."""

    layout: Layout = Layout.INDIVIDUAL
    discount: float | None = None
    credit: Credit | None = None
    drift: Drift = Drift.FORK
    purposes: frozenset[str] | None = None
    agents: frozenset[str] | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """One training sample: its interactions in order (one for layout individual), where they stand, and returns."""

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    returns: tuple[float, ...]
    rewards: FloatArray
    raw_rewards: FloatArray

    @property
    def last(self) -> Interaction:
        """The interaction that the sample ends with."""
        return self.placements[-1].interaction

    @property
    def masked_tokens(self) -> int:
        """Sampled tokens of its path that stand nowhere in it as sampled."""
        return sum(len(placed.interaction.output_ids) for placed in self.placements if placed.start is None)

    def to_json(self) -> dict[str, Any]:
        """The sample as a dict whose arrays are numpy: int32 and float32 [L], attention_mask bool [L], rewards [1]."""
        last, arrays = self.last, self.arrays
        return {
            "interaction_id": last.id,
            "interaction_ids": [placed.interaction.id for placed in self.placements],
            "session_id": self.session.session_id,
            "group_id": self.session.group_id,
            "task_id": self.session.task_id,
            "purpose": self.purpose,
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "sampling": last.sampling.to_json(),
            "masked_tokens": self.masked_tokens,
            "recomputable": all(recomputable(placed.interaction) for placed in self.placements),
            "turns": [self._turn(placed) for placed in self.placements],
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(len(arrays.input_ids), bool),
            "rewards": self.rewards,
            "raw_rewards": self.raw_rewards,
        }

    def _turn(self, placed: Placement) -> dict[str, Any]:
        interaction = placed.interaction
        return {
            "interaction_id": interaction.id,
            "sampling": interaction.sampling.to_json(),
            "reward": interaction.reward,
            "return": self.returns[placed.turn],
            "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
            "state_hash": interaction.state_hash,
            "recomputable": recomputable(interaction),
            "span": list(placed.span) if placed.span is not None else None,
        }


def recomputable(interaction: Interaction) -> bool:
    """Whether a trainer gets the same logprobs from the ids and the temperature alone."""
    sampling = interaction.sampling
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    return not (penalised or sampling.logit_bias or interaction.notes.get("grammar"))


def export_session(record: SessionRecord, interactions: Sequence[Interaction], options: ExportOptions) -> list[Sample]:
    """The samples of one session, by their last interaction. `interactions` are all of it, in order of `seq`."""
    discount = record.discount if options.discount is None else options.discount
    exporter = _Exporter(
        record,
        InteractionCache(interactions),
        compute_returns(interactions, discount, options.credit or record.credit),
        derive(interactions),
        options,
    )
    return exporter.individual() if options.layout is Layout.INDIVIDUAL else exporter.concat()


@dataclass(frozen=True, slots=True)
class _Exporter:
    """One session while it is exported; `returns` and `purposes` are by interaction id."""

    record: SessionRecord
    cache: InteractionCache
    returns: Mapping[str, float]
    purposes: Mapping[str, str]
    options: ExportOptions

    def individual(self) -> list[Sample]:
        return [self._single(node) for node in self.cache.nodes.values() if self._selected(node)]

    def concat(self) -> list[Sample]:
        """One sample a leaf, leaves by rising `seq`: the first in which a node stands as sampled trains it."""
        nodes = list(self.cache.nodes.values())
        selected = {node.interaction.id for node in nodes if self._selected(node)}
        samples: list[Sample] = []
        trained: set[str] = set()
        for leaf in leaves(nodes, selected, self.options.drift):
            path = path_to(self.cache, leaf, self.options.drift)
            places = tuple(
                Placement(node.interaction, turn, start, self._trains(node, selected - trained))
                for turn, (node, start) in enumerate(zip(path.nodes, path.starts, strict=True))
            )
            trained.update(place.interaction.id for place in places if place.start is not None)
            score = sum(place.interaction.reward or 0.0 for place in places)
            samples.append(self._sample(places, fill(path.ids, places), score))
        return samples

    def _single(self, node: Node) -> Sample:
        interaction = node.interaction
        place = Placement(interaction, 0, interaction.prompt_tokens, interaction.trainable)
        return self._sample((place,), fill(self.cache.token_ids(node), (place,)), self.returns[interaction.id])

    def _sample(self, places: tuple[Placement, ...], arrays: TokenArrays, reward: float) -> Sample:
        last = places[-1].interaction
        returns = tuple(self.returns[place.interaction.id] for place in places)
        raw = last.reward or 0.0
        return Sample(self.record, places, self.purposes[last.id], arrays, returns, _scalar(reward), _scalar(raw))

    def _selected(self, node: Node) -> bool:
        interaction, options = node.interaction, self.options
        if options.agents is not None and interaction.agent not in options.agents:
            return False
        return options.purposes is None or self.purposes[interaction.id] in options.purposes

    def _trains(self, node: Node, wanted: set[str]) -> bool:
        return node.interaction.trainable and node.interaction.id in wanted


def masked_tokens(samples: Sequence[Sample]) -> int:
    """Sampled tokens that stand in none of a session's samples as sampled."""
    placements = [placed for sample in samples for placed in sample.placements]
    stands = {placed.interaction.id for placed in placements if placed.start is not None}
    lost = {placed.interaction.id: len(placed.interaction.output_ids) for placed in placements}
    return sum(count for name, count in lost.items() if name not in stands)


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
