"""A row of an export: `labels` describe it (JSON values), `columns` are the arrays that a trainer reads.

All rows of one layout have the same columns in the same order, but for two optional columns: `token_rewards`, if
rewards of single tokens were set, and `unmasked_logprobs`, if trained tokens have them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.token_arrays import FloatArray, Placement, first_reason
from proxy.types import PlacedImage, SessionRecord
from tokengrove.options.session import RewardScope
from tokengrove.reasons import LogprobsOf

Columns = dict[str, NDArray[Any]]
Labels = dict[str, Any]
PositionsOf = Callable[[Sequence[PlacedImage], int], NDArray[np.int64]]
"""Positions [3, L] (time, height, width) of a sequence of L tokens with these images, by the rule of the model."""
MROPE = "mrope_position_ids"
"""The column of these positions."""


class SampleRow(Protocol):
    """A sample of any layout."""

    @property
    def is_trained(self) -> bool:
        """Whether any of its tokens is trained."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Its turns, parents first."""

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """Its images in order, with their places in its own tokens. Empty if the export leaves images out."""

    def labels(self) -> Labels:
        """Its description, as JSON values."""

    def columns(self) -> Columns:
        """Its arrays by name."""


@dataclass(frozen=True, slots=True)
class Weighting:
    """The weight, score and advantages of a sample, which depend on other samples.

    `weight`: 1 / (number of samples of its session with a trained token), or 0 for a sample without one, so a session
    counts once in a weighted mean. `score`: the score of its session, path or agent, by `scope`; None: nothing was
    rewarded. `advantage`: the advantage of the score within the group. `steps`: one value per turn, the advantage of
    the turn's return among steps of equal state. `turns`: one value per turn, its advantage by `turn_advantages`.
    """

    weight: float = 0.0
    scope: RewardScope = RewardScope.SESSION
    score: float | None = None
    advantage: float | None = None
    steps: tuple[float, ...] | None = None
    turns: tuple[float, ...] | None = None

    def labels(self) -> Labels:
        """`rewarded`, `score` and `reward_scope`."""
        return {"rewarded": self.score is not None, "score": self.score, "reward_scope": self.scope}

    def columns(self) -> Columns:
        """float32: `weight` [1]; if requested, `advantages` [1], `step_advantages` and `turn_advantages` [turns]."""
        found: Columns = {"weight": scalar(self.weight)}
        if self.advantage is not None:
            found["advantages"] = scalar(self.advantage)
        if self.steps is not None:
            found["step_advantages"] = np.array(self.steps, np.float32)
        if self.turns is not None:
            found["turn_advantages"] = np.array(self.turns, np.float32)
        return found


def row_labels(session: SessionRecord, placements: Sequence[Placement], purpose: str) -> Labels:
    """The labels that rows of all layouts have.

    `recomputable`: the first of the reasons of all turns, or None. `logprobs_of`: of the trained turns, the one
    furthest from the rule. `route`: the one of its turns; absent without a table of models.
    """
    interactions = [placed.interaction for placed in placements]
    return {
        "interaction_id": interactions[-1].id,
        "interaction_ids": [interaction.id for interaction in interactions],
        "session_id": session.session_id,
        "group_id": session.group_id,
        "task_id": session.task_id,
        "purpose": purpose,
        "agent": interactions[-1].agent,
        **({"route": interactions[-1].route} if interactions[-1].route else {}),
        "recomputable": first_reason(placed.recomputable for placed in placements),
        "logprobs_of": LogprobsOf.furthest(placed.interaction.logprobs_of for placed in placements if placed.trains),
    }


def turn_labels(placed: Placement, main: float | None, value: float) -> Labels:
    """The entry of one turn: `reward` is its main reward, `return` its return `value`. Times are Unix seconds.

    `version` is "uncertain" if one of its versions is uncertain, else absent. `output_start` is the index in the
    output of the first token of `span`, absent if it is 0.
    """
    interaction = placed.interaction
    return {
        "interaction_id": interaction.id,
        "parent_id": interaction.parent_id,
        "model": interaction.model,
        "sampling": interaction.sampling.to_json(),
        "best_effort": list(interaction.best_effort),
        **({"version": "uncertain"} if interaction.uncertain else {}),
        "reward": main,
        "rewards": dict(interaction.rewards),
        "return": value,
        "finish_reason": interaction.finish_reason.value if interaction.finish_reason else None,
        "state_hash": interaction.state_hash,
        "created_at": interaction.created_at,
        "completed_at": interaction.completed_at,
        "recomputable": placed.recomputable,
        "logprobs_of": interaction.logprobs_of,
        "span": None if placed.span is None else list(placed.span),
        **({"output_start": placed.kept[0]} if placed.kept is not None and placed.kept[0] else {}),
    }


def image_labels(images: Sequence[PlacedImage]) -> Labels:
    """The label `images`: digest, start, length, width, height and, if set, detail of each; no label without images."""
    return {"images": [image.to_json() for image in images]} if images else {}


def placed_rewards(length: int, placements: Sequence[Placement]) -> FloatArray | None:
    """Rewards of single tokens, float32 [L], 0 where none was set; None if no output has any."""
    found = [placed for placed in placements if placed.interaction.token_rewards and placed.span is not None]
    if not found:
        return None
    rewards = np.zeros(length, np.float32)
    for placed in found:
        assert placed.span is not None and placed.interaction.token_rewards is not None
        kept = slice(*(placed.kept or (0, 0)))
        rewards[slice(*placed.span)] = np.asarray(placed.interaction.token_rewards, np.float32)[kept]
    return rewards


def scalar(value: float) -> FloatArray:
    """A float32 array of shape [1]."""
    return np.array([value], np.float32)


class MadeRows(Sequence[SampleRow]):
    """Rows that are made when they are read. `makers` make one row each, the same one at every call."""

    def __init__(self, makers: Sequence[Callable[[], SampleRow]]) -> None:
        self._makers = makers

    def __len__(self) -> int:
        return len(self._makers)

    @overload
    def __getitem__(self, at: int) -> SampleRow: ...
    @overload
    def __getitem__(self, at: slice) -> MadeRows: ...
    def __getitem__(self, at: int | slice) -> SampleRow | MadeRows:
        return MadeRows(self._makers[at]) if isinstance(at, slice) else self._makers[at]()
