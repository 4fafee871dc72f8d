"""A row of an export: `labels` describe it (JSON values), `columns` are the arrays that a trainer reads.

All rows of one layout have the same columns in the same order, except `token_rewards`: a row has it only if rewards of
single tokens were set.
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
        """Whether any of its tokens is trained."""

    def labels(self) -> Labels:
        """Its description, as JSON values."""

    def columns(self) -> Columns:
        """Its arrays by name."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weight and advantages of a sample, which depend on other samples.

    `weight`: 1 / (number of samples of its session with a trained token), or 0 for a sample without one, so a session
    counts once in a weighted mean. `advantage`: of its session's score within the group. `steps`: one value per turn,
    the advantage of the turn's return among steps of equal state.
    """

    weight: float = 0.0
    advantage: float | None = None
    steps: tuple[float, ...] | None = None

    def columns(self) -> Columns:
        """float32: `weight` [1]; if requested, `advantages` [1] and `step_advantages` [turns]."""
        found: Columns = {"weight": scalar(self.weight)}
        if self.advantage is not None:
            found["advantages"] = scalar(self.advantage)
        if self.steps is not None:
            found["step_advantages"] = np.array(self.steps, np.float32)
        return found


@dataclass(frozen=True, slots=True)
class PathSample:
    """A sample of a path in the tree: one interaction (layout individual), or a root and its descendants to a leaf.

    `returns`, `main` (the main rewards) and `extras` (included messages and text) have one entry per turn. `rewards`
    float32 [1]: individual: the return; concat: the sum of the main rewards on the path, the episode's score.
    `raw_rewards` float32 [1]: the main reward of the last interaction, 0 if it has none.
    """

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    returns: tuple[float, ...]
    main: tuple[float | None, ...]
    rewards: FloatArray
    raw_rewards: FloatArray
    weighting: Weighting = Weighting()
    extras: tuple[Labels, ...] = ()
    text: str | None = None

    @property
    def last(self) -> Interaction:
        """The last interaction of the sample."""
        return self.placements[-1].interaction

    @property
    def masked_tokens(self) -> int:
        """The number of sampled tokens of its path that the sample does not contain as sampled."""
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
        """The columns of L tokens, and those of `weighting`.

        int32 [L]: input_ids, loss_mask, versions, turn_ids. float32 [L]: logprobs; token_rewards if any were set. bool
        [L]: attention_mask, all True. float32 [1]: rewards, raw_rewards.
        """
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
            **self.weighting.columns(),
        }
        if (rewards := placed_rewards(len(arrays.input_ids), self.placements)) is not None:
            found["token_rewards"] = rewards
        return found

    def to_json(self) -> dict[str, Any]:
        """Labels and columns in one dict; the arrays are numpy."""
        return {**self.labels(), **self.columns()}

    def _turn(self, placed: Placement) -> Labels:
        at = placed.turn
        span = list(placed.span) if placed.span is not None else None
        extra = self.extras[at] if self.extras else {}
        return {**turn_labels(placed.interaction, self.main[at], self.returns[at]), "span": span, **extra}


@dataclass(frozen=True, slots=True)
class TreeSample:
    """The nodes of a session, each once, parents before children; node n has the tokens offsets[n] to offsets[n + 1].

    `parents`: the index of each node's parent, -1 for a root and for a node that is not aligned with its parent.
    `positions`: the position of each token in its own sequence (root to node). A token attends to its own node and to
    the ancestors of that node. `turn_ids` are indexes of nodes.
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
    weighting: Weighting = Weighting()
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
        """The columns of a `PathSample`, for all T tokens of N nodes, and those of the tree.

        int32: position_ids [T], node_offsets [N + 1], node_parents and node_positions [N] (the position of a node's
        first token). float32 [N]: node_rewards, node_returns. `rewards` float32 [1] is the sum of node_rewards.
        """
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
            **self.weighting.columns(),
        }
        if (rewards := placed_rewards(length, self.placements)) is not None:
            found["token_rewards"] = rewards
        return found


def row_labels(session: SessionRecord, interactions: Sequence[Interaction], purpose: str) -> Labels:
    """The labels that rows of all layouts have."""
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
    """The entry of one turn: `reward` is its main reward, `return` its return `value`."""
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
    """Whether a trainer can recompute the logprobs from token ids and temperature alone.

    Logprobs are natural logarithms after temperature, penalties, logit_bias and grammar mask, and before top-p, top-k
    and min-p. So penalties, a bias or a grammar make this False.
    """
    sampling = interaction.sampling
    penalised = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) != (0.0, 0.0, 1.0)
    return not (penalised or sampling.logit_bias or interaction.grammar)


def placed_rewards(length: int, placements: Sequence[Placement]) -> FloatArray | None:
    """Rewards of single tokens, float32 [L], 0 where none was set; None if no output has any."""
    found = [placed for placed in placements if placed.interaction.token_rewards and placed.span is not None]
    if not found:
        return None
    rewards = np.zeros(length, np.float32)
    for placed in found:
        assert placed.span is not None and placed.interaction.token_rewards is not None
        rewards[slice(*placed.span)] = np.asarray(placed.interaction.token_rewards, np.float32)
    return rewards


def scalar(value: float) -> FloatArray:
    """A float32 array of shape [1]."""
    return np.array([value], np.float32)
