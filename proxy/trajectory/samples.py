"""A row of an export: what says what it is (`labels`, values of JSON) and what is trained on (`columns`, arrays).

Every row of one layout has the same columns in the same order, `token_rewards` apart: it is there only with rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.tensors import FloatArray, Placement, TokenArrays
from proxy.types import Interaction, SessionRecord

Columns = dict[str, NDArray[Any]]
Labels = dict[str, Any]


class SampleRow(Protocol):
    """A sample of any layout."""

    @property
    def is_trained(self) -> bool:
        """Whether any of its tokens is."""

    def labels(self) -> Labels:
        """What it is: values of JSON."""

    def columns(self) -> Columns:
        """Its arrays."""


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a sample stands among others: `weight` is 1 / (its session's samples that train anything), else 0.

    `advantage` is of its session's score in its group, `steps` one a turn, of the turn's return among equal states.
    """

    weight: float = 0.0
    advantage: float | None = None
    steps: tuple[float, ...] | None = None

    def columns(self) -> Columns:
        """float32: `weight` [1]; `advantages` [1] and `step_advantages` [turns] where they were asked for."""
        found: Columns = {"weight": scalar(self.weight)}
        if self.advantage is not None:
            found["advantages"] = scalar(self.advantage)
        if self.steps is not None:
            found["step_advantages"] = np.array(self.steps, np.float32)
        return found


@dataclass(frozen=True, slots=True)
class PathSample:
    """One training sample: its interactions in order (one for layout individual), where they stand, and returns.

    `main` are the rewards that count, and `extras` what is included beside, both one a turn.
    """

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    returns: tuple[float, ...]
    main: tuple[float | None, ...]
    rewards: FloatArray
    raw_rewards: FloatArray
    standing: Standing = Standing()
    extras: tuple[Labels, ...] = ()
    text: str | None = None

    @property
    def last(self) -> Interaction:
        """The interaction that the sample ends with."""
        return self.placements[-1].interaction

    @property
    def masked_tokens(self) -> int:
        """Sampled tokens of its path that stand nowhere in it as sampled."""
        return sum(len(placed.interaction.output_ids) for placed in self.placements if placed.start is None)

    @property
    def is_trained(self) -> bool:
        return bool(self.arrays.loss_mask.any())

    def labels(self) -> Labels:
        last = self.last
        labels = {
            **row_labels(self.session, [placed.interaction for placed in self.placements], self.purpose),
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "sampling": last.sampling.to_json(),
            "masked_tokens": self.masked_tokens,
            "turns": [self._turn(placed) for placed in self.placements],
        }
        return labels if self.text is None else {**labels, "text": self.text}

    def columns(self) -> Columns:
        """int32 and float32 [L], attention_mask bool [L], rewards float32 [1], and what its standing has."""
        arrays = self.arrays
        found: Columns = {
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(len(arrays.input_ids), bool),
            "rewards": self.rewards,
            "raw_rewards": self.raw_rewards,
            **self.standing.columns(),
        }
        if (rewards := placed_rewards(len(arrays.input_ids), self.placements)) is not None:
            found["token_rewards"] = rewards
        return found

    def to_json(self) -> dict[str, Any]:
        """All of it as one dict, whose arrays are numpy."""
        return {**self.labels(), **self.columns()}

    def _turn(self, placed: Placement) -> Labels:
        at = placed.turn
        span = list(placed.span) if placed.span is not None else None
        extra = self.extras[at] if self.extras else {}
        return {**turn_labels(placed.interaction, self.main[at], self.returns[at]), "span": span, **extra}


@dataclass(frozen=True, slots=True)
class TreeSample:
    """A session's nodes once each, parents first; node n has the tokens `offsets[n]` to `offsets[n + 1]`.

    `parents` index the nodes, -1 at a root and where the parent's tokens are no prefix. `positions` are of each token
    in its own sequence, so attention is to the own node and those above. `turn_ids` index the nodes.
    """

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    offsets: NDArray[np.int32]
    parents: NDArray[np.int32]
    positions: NDArray[np.int32]
    returns: tuple[float, ...]
    main: tuple[float | None, ...]
    standing: Standing = Standing()
    extras: tuple[Labels, ...] = ()

    @property
    def is_trained(self) -> bool:
        return bool(self.arrays.loss_mask.any())

    def labels(self) -> Labels:
        nodes = [placed.interaction for placed in self.placements]
        turns = []
        for at, placed in enumerate(self.placements):
            assert placed.span is not None
            extra = self.extras[at] if self.extras else {}
            shown = turn_labels(placed.interaction, self.main[at], self.returns[at])
            turns.append({**shown, "span": list(placed.span), **extra})
        finish = nodes[-1].finish_reason
        return {
            **row_labels(self.session, nodes, self.purpose),
            "finish_reason": finish.value if finish else None,
            "sampling": nodes[-1].sampling.to_json(),
            "masked_tokens": 0,
            "turns": turns,
        }

    def columns(self) -> Columns:
        """As a sample's, of T tokens in all; `node_` columns are of N nodes, `node_offsets` int32 [N + 1]."""
        arrays, length = self.arrays, len(self.arrays.input_ids)
        main = np.array([value or 0.0 for value in self.main], np.float32)
        found: Columns = {
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(length, bool),
            "position_ids": self.positions,
            "node_offsets": self.offsets,
            "node_parents": self.parents,
            "node_positions": np.array([placed.interaction.prefix_length for placed in self.placements], np.int32),
            "node_rewards": main,
            "node_returns": np.array(self.returns, np.float32),
            "rewards": scalar(float(main.sum(dtype=np.float64))),
            "raw_rewards": main[-1:],
            **self.standing.columns(),
        }
        if (rewards := placed_rewards(length, self.placements)) is not None:
            found["token_rewards"] = rewards
        return found


def row_labels(session: SessionRecord, interactions: Sequence[Interaction], purpose: str) -> Labels:
    return {
        "interaction_id": interactions[-1].id,
        "interaction_ids": [interaction.id for interaction in interactions],
        "session_id": session.session_id,
        "group_id": session.group_id,
        "task_id": session.task_id,
        "purpose": purpose,
        "recomputable": all(recomputable(interaction) for interaction in interactions),
    }


def turn_labels(interaction: Interaction, main: float | None, value: float) -> Labels:
    return {
        "interaction_id": interaction.id,
        "sampling": interaction.sampling.to_json(),
        "reward": main,
        "rewards": dict(interaction.rewards),
        "return": value,
        "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
        "state_hash": interaction.state_hash,
        "recomputable": recomputable(interaction),
    }


def recomputable(interaction: Interaction) -> bool:
    """Whether a trainer gets the same logprobs from the ids and the temperature alone."""
    sampling = interaction.sampling
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    return not (penalised or sampling.logit_bias or interaction.grammar)


def placed_rewards(length: int, placements: Sequence[Placement]) -> FloatArray | None:
    """The rewards of single tokens, float32 [L], 0 where none was set; None where no output has any."""
    found = [placed for placed in placements if placed.interaction.token_rewards and placed.span is not None]
    if not found:
        return None
    rewards = np.zeros(length, np.float32)
    for placed in found:
        assert placed.span is not None and placed.interaction.token_rewards is not None
        rewards[slice(*placed.span)] = np.asarray(placed.interaction.token_rewards, np.float32)
    return rewards


def scalar(value: float) -> FloatArray:
    return np.array([value], np.float32)
