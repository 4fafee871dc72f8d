"""Fields of ROLL's DataProto as its environment managers build them: padded on the right, score at the last token.

`trajectories` takes samples of layout concat, like ROLL's trajectory manager. `steps` takes samples of layout
individual, like its step manager: scores are raw rewards, because ROLL discounts them itself, and all steps of a
session share a `traj_id`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.client.adapters.parts import group_of, objects, prompt_length, turn_of
from proxy.client.tensors import pad_right, to_tensordict
from proxy.client.values import Sample
from proxy.errors import InvalidRequest

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True, slots=True)
class RollFields:
    """The three arguments of ROLL's DataProto: `batch` are arrays [B, L], `non_tensor_batch` are objects [B]."""

    batch: dict[str, NDArray[Any]]
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any]

    def to_tensordict(self) -> TensorDict:
        """`batch` as a TensorDict."""
        return to_tensordict(self.batch)


def trajectories(samples: Sequence[Sample], *, sequence_length: int | None = None, pad_token_id: int = 0) -> RollFields:
    """One row per sample; its score is the sample's reward. Raises InvalidRequest if a sample is too long.

    `input_ids`, `attention_mask`, `position_ids` int64 [B, L] (positions from 0), `response_mask`,
    `prompt_mask` bool [B, L], `scores` float32 [B, L], `infer_logprobs` float32 [B, L - 1]: of the next token.
    """
    scores = [float(sample.rewards[0]) for sample in samples]
    steps: list[list[float]] = [[turn.get("reward") or 0.0 for turn in sample.turns] for sample in samples]
    others = {"step_scores": objects(steps), "episode_scores": objects(scores), **_names(samples)}
    return RollFields(_batch(samples, scores, sequence_length, pad_token_id), others, {"metrics": {}})


def steps(samples: Sequence[Sample], *, sequence_length: int | None = None, pad_token_id: int = 0) -> RollFields:
    """One row per turn: its score is the raw reward, `episode_scores` the session's sum, `step` its index.

    Raises InvalidRequest for a sample of several turns or one that is too long.
    """
    turns = [turn_of(sample) for sample in samples]
    scores = [float(sample.raw_rewards[0]) for sample in samples]
    of_session: dict[str, list[float]] = defaultdict(list)
    places = []
    for sample, score in zip(samples, scores, strict=True):
        places.append(len(of_session[sample.session_id]))
        of_session[sample.session_id].append(score)
    others = {
        "step_scores": objects(scores),
        "episode_scores": objects([sum(of_session[sample.session_id]) for sample in samples]),
        "state_hash": objects([turn.get("state_hash") for turn in turns]),
        "step": objects(places),
        **_names(samples),
    }
    return RollFields(_batch(samples, scores, sequence_length, pad_token_id), others, {"metrics": {}})


def _names(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    sessions, groups = [sample.session_id for sample in samples], [group_of(sample) for sample in samples]
    return {
        "env_ids": objects(sessions),
        "traj_id": objects(sessions),
        "group_ids": objects(groups),
        "traj_group_id": objects(groups),
        "tags": objects([sample.task_id or "" for sample in samples]),
    }


def _batch(
    samples: Sequence[Sample], scores: Sequence[float], length: int | None, pad_token_id: int
) -> dict[str, NDArray[Any]]:
    for sample in samples:
        if length is not None and len(sample.input_ids) > length:
            raise InvalidRequest(
                f"sample {sample.interaction_id!r} has {len(sample.input_ids)} tokens, more than sequence_length "
                f"{length}; raise sequence_length or remove the sample"
            )
    lengths = [len(sample.input_ids) for sample in samples]
    places = [np.arange(count) for count in lengths]
    prompts = [place < prompt_length(sample) for place, sample in zip(places, samples, strict=True)]
    ends = [_at_the_end(count, score) for count, score in zip(lengths, scores, strict=True)]
    return {
        "input_ids": pad_right([sample.input_ids for sample in samples], np.int64, pad_token_id, length),
        "attention_mask": pad_right([np.ones(count) for count in lengths], np.int64, 0, length),
        "position_ids": pad_right(places, np.int64, 0, length),
        "response_mask": pad_right([sample.loss_mask for sample in samples], np.bool_, False, length),
        "prompt_mask": pad_right(prompts, np.bool_, False, length),
        "scores": pad_right(ends, np.float32, 0.0, length),
        "infer_logprobs": pad_right([sample.logprobs for sample in samples], np.float32, 0.0, length)[:, 1:],
    }


def _at_the_end(length: int, score: float) -> NDArray[np.float32]:
    scores = np.zeros(length, np.float32)
    scores[-1] = score
    return scores
