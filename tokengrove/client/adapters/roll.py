"""The fields of ROLL's DataProto as its environment managers build them: padded on the right, score at the last token.

`trajectories` takes samples of layout concat, like ROLL's trajectory manager. `steps` takes samples of layout
individual, like its step manager: scores are raw rewards, because ROLL discounts them itself, and all steps of a
session share a `traj_id`. The names match ROLL's `TrajEnvManager`, `StepEnvManager` and `ProxyEnvManager`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.adapters import parts, vision
from tokengrove.client.adapters.parts import (
    Annotation,
    Sessions,
    as_json,
    group_of,
    messages_of,
    metadata_of,
    numeric_metrics,
    objects,
    prompt_length,
    score_of,
    token_columns,
    tools_of,
    turn_of,
    turn_rewards,
    weights,
)
from tokengrove.client.adapters.roll_metrics import session_metrics
from tokengrove.client.tensors import pad_right, to_tensordict
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

# The columns that ROLL writes to its table of trajectories; the key is misspelt in ROLL.
_TABLE = ("COLUMMNS_CONFIG", [[name, "string"] for name in ("trajectory_data", "messages", "tools", "exp_name")])

# The streams of the columns that ROLL's trainer computes (roll/pipeline/agentic/agentic_pipeline.py).
_TOLD = {"old_log_probs": "logprobs", "ref_log_probs": "ref_logprobs", "advantages": "advantages"}


@dataclass(frozen=True, slots=True)
class RollFields:
    """The three arguments of ROLL's DataProto: `batch` are arrays [B, ...], `non_tensor_batch` are objects [B].

    `batch`, where L is the padded length:
    `input_ids`, `attention_mask`, `position_ids` int64 [B, L] (positions from 0); `response_mask`, `prompt_mask` bool
    [B, L]; `scores` float32 [B, L]; `infer_logprobs` float32 [B, L - 1]: column t belongs to token t + 1, as in ROLL.
    Of the same shape: `returns`, `token_rewards` and, if the export has them, `advantages` and `step_advantages`. They
    are 0 on tokens that are not trained; token rewards are 0 where none was set. `versions` int32 [B, L]: weight
    versions of the trained tokens, -1 elsewhere. float32 [B]: `weight`; `step_rewards`, the return of the last turn,
    which equals ROLL's `compute_discounted_returns` with credit `linear`, the setting of sessions of ROLL's managers.

    For samples of a vision model, `position_ids` is [B, 3, L] (time, height, width), as in ROLL's vision manager, and
    `non_tensor_batch` has `multi_modal_inputs`: per row, a dict of the tensors of its images from the processor
    (`pixel_values`, `image_grid_thw`); empty without images.

    `non_tensor_batch`: `env_ids`, `group_ids`, `tags`, `exp_name` (metadata `env_id`, `group_id`, `tag`, `exp_name` of
    the session, else its id, its group, its task and the argument), `traj_id` (metadata `traj_id`, else the session),
    `traj_group_id` (the group), `interaction_id`, `step` and `state_hash` (`step_N` if the agent set none, as ROLL's
    proxy does), `step_scores`, `episode_scores` (of the session), and as JSON text `messages`, `tools` (empty unless
    the export included messages) and `trajectory_data`.

    `meta_info`: `metrics` are means over the sessions of a tag, `env/TAG/NAME`: ROLL's metrics and those of the
    sessions. ROLL's `latency/pure_inf_*` and `latency/proxy_ovh_*` need `first_token_at`.
    """

    batch: dict[str, NDArray[Any]]
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any]

    def to_tensordict(self) -> TensorDict:
        """`batch` as a TensorDict."""
        return to_tensordict(self.batch)


def trajectories(
    samples: Sequence[Sample],
    *,
    sessions: Sessions | None = None,
    exp_name: str = "",
    sequence_length: int | None = None,
    pad_token_id: int = 0,
    episode_scores: Mapping[str, float] | None = None,
    discounted: bool = False,
    more_returned: Mapping[str, float] | None = None,
    first_token_at: Mapping[str, float] | None = None,
) -> RollFields:
    """One row per sample; its score is the sample's reward, `step_scores` are the rewards of its turns.

    `sessions` is `Export.sessions`, for metadata and metrics. `episode_scores`: by session id, scores that replace the
    sum of the rewards. With `discounted`, the score of a row is the return of its first turn plus the turn's entry in
    `more_returned`, by interaction id. `first_token_at`: by interaction id, the time of the first token (Unix seconds),
    for ROLL's latency metrics. Raises InvalidRequest if a sample is too long.
    """
    given = episode_scores or {}
    scores = [given.get(sample.session_id, sample.reward) for sample in samples]
    if discounted:
        scores = [_discounted_score(sample, more_returned or {}) for sample in samples]
    rows = _rows(samples, scores, sessions, given)
    step_scores = [turn_rewards(sample) for sample in samples]
    return _fields(rows, step_scores, exp_name, sequence_length, pad_token_id, first_token_at or {})


def steps(
    samples: Sequence[Sample],
    *,
    sessions: Sessions | None = None,
    exp_name: str = "",
    sequence_length: int | None = None,
    pad_token_id: int = 0,
    episode_scores: Mapping[str, float] | None = None,
    discounted: bool = False,
    first_token_at: Mapping[str, float] | None = None,
) -> RollFields:
    """One row per turn; its score and `step_scores` are the raw reward, `step` counts the session's turns from 0.

    The arguments are those of `trajectories`. With `discounted`, the score of a row is the return of its turn, but
    `step_scores` remain raw. Raises InvalidRequest for a sample that has several turns or is too long.
    """
    for sample in samples:
        if sample.interaction_ids:
            turn_of(sample)
    step_scores = [float(sample.raw_rewards[0]) for sample in samples]
    scores = [sample.reward for sample in samples] if discounted else step_scores
    rows = _rows(samples, scores, sessions, episode_scores or {})
    return _fields(rows, step_scores, exp_name, sequence_length, pad_token_id, first_token_at or {})


def annotation(samples: Sequence[Sample], data: Any) -> Annotation:
    """Arguments of `client.annotate` from a DataProto or `RollFields` of these samples, before the actor's update.

    Rows are found by `interaction_id`, so ROLL may have reordered, repeated or removed them. Streams from float32
    [B, L - 1]: `logprobs` (`old_log_probs`), `ref_logprobs` (`ref_log_probs`), `advantages`. Raises InvalidRequest for
    a row of another sample, and without any of these.
    """
    batch = dict(data.batch.items())
    ids = [sample.interaction_id for sample in samples], data.non_tensor_batch["interaction_id"].tolist()
    return parts.annotation(samples, batch, _TOLD, "next", ids)


def placeholder(session_id: str, group_id: str | None = None, pad_token_id: int = 0) -> Sample:
    """The sample of an episode in which nothing was sampled, as in ROLL: one token of padding, not trained."""
    one = np.zeros(1, np.int32)
    return Sample(
        session_id=session_id,
        group_id=group_id,
        interaction_id="",
        interaction_ids=(),
        input_ids=np.full(1, pad_token_id, np.int32),
        loss_mask=one,
        logprobs=np.zeros(1, np.float32),
        versions=one - 1,
        turn_ids=one - 1,
        attention_mask=np.ones(1, np.bool_),
        rewards=np.zeros(1, np.float32),
        raw_rewards=np.zeros(1, np.float32),
        rewarded=False,
    )


def _discounted_score(sample: Sample, more_returned: Mapping[str, float]) -> float:
    if not sample.turns:
        return 0.0
    first = sample.turns[0]
    return float(first["return"] or 0.0) + more_returned.get(first["interaction_id"], 0.0)


@dataclass(frozen=True, slots=True)
class _Row:
    """A sample with its `score`. `place` is its index among the samples of its session.

    Values of the session: `siblings` (number of samples), `actions` (number of turns), `episode_score`, `metadata` and
    `metrics`.
    """

    sample: Sample
    score: float
    place: int
    siblings: int
    actions: int
    episode_score: float
    metadata: Mapping[str, Json]
    metrics: Mapping[str, float]

    @property
    def tag(self) -> Json:
        return self.metadata.get("tag", self.sample.task_id or "")

    @property
    def traj_id(self) -> str:
        return str(self.metadata.get("traj_id", self.sample.session_id))

    @property
    def state(self) -> str:
        return (self.sample.turns[-1].get("state_hash") if self.sample.turns else None) or f"step_{self.place}"

    @property
    def last_return(self) -> float:
        return float(self.sample.turns[-1].get("return") or 0.0) if self.sample.turns else 0.0

    def trajectory(self) -> Json:
        """ROLL's `trajectory_data`. If there are several branches, its id includes the number of the branch."""
        sample = self.sample
        return {
            "trajectory_id": f"{self.traj_id}_b{self.place}" if self.siblings > 1 else self.traj_id,
            "timestamp": _timestamp(sample),
            "num_actions": self.actions,
            "branch_or_step_idx": self.place,
            "num_branches_or_steps": self.siblings,
            "reward_info": {"episode_reward": self.episode_score, "step_reward": self.score},
            "messages": messages_of(sample),
            "finish_reason": sample.finish_reason or "unknown",
        }


def _rows(
    samples: Sequence[Sample], scores: Sequence[float], sessions: Sessions | None, episode_scores: Mapping[str, float]
) -> list[_Row]:
    siblings, places, rows = Counter(sample.session_id for sample in samples), Counter[str](), []
    turns: dict[str, set[str]] = defaultdict(set)
    for sample in samples:
        turns[sample.session_id].update(sample.interaction_ids)
    for sample, score in zip(samples, scores, strict=True):
        name = sample.session_id
        about, metrics = metadata_of(sample, sessions), numeric_metrics(sample, sessions)
        of_episode = episode_scores[name] if name in episode_scores else score_of(sample)
        of_session = (places[name], siblings[name], len(turns[name]), of_episode)
        rows.append(_Row(sample, score, *of_session, about, metrics))
        places[name] += 1
    return rows


def _fields(
    rows: Sequence[_Row],
    step_scores: Sequence[Any],
    exp_name: str,
    sequence_length: int | None,
    pad_token_id: int,
    first_token_at: Mapping[str, float],
) -> RollFields:
    _check_lengths(rows, sequence_length)
    samples = [row.sample for row in rows]
    others = {**_names(rows, exp_name), "step_scores": objects(step_scores)}
    meta = {"metrics": _means(rows, first_token_at), _TABLE[0]: [list(column) for column in _TABLE[1]]}
    batch = _batch(rows, sequence_length, pad_token_id)
    if vision.has_vision(samples):
        others["multi_modal_inputs"] = objects([vision.tensors(sample) for sample in samples])
    if vision.has_positions(samples):
        batch["position_ids"] = _positions(samples, batch["input_ids"].shape[1])
    return RollFields(batch, others, meta)


def _positions(samples: Sequence[Sample], length: int) -> NDArray[np.int64]:
    """Positions int64 [B, 3, L], with zeros in the padding."""
    padded = np.zeros((len(samples), 3, length), np.int64)
    for line, sample in zip(padded, samples, strict=True):
        found = vision.positions(sample)
        line[:, : found.shape[1]] = found
    return padded


def _check_lengths(rows: Sequence[_Row], most: int | None) -> None:
    for sample in (row.sample for row in rows):
        if most is not None and len(sample.input_ids) > most:
            raise InvalidRequest(
                f"sample {sample.interaction_id!r} has {len(sample.input_ids)} tokens, more than sequence_length "
                f"{most}; raise sequence_length or remove the sample"
            )


def _names(rows: Sequence[_Row], exp_name: str) -> dict[str, NDArray[Any]]:
    groups = [group_of(row.sample) for row in rows]
    named = {
        "env_ids": [row.metadata.get("env_id", row.sample.session_id) for row in rows],
        "group_ids": [row.metadata.get("group_id", group) for row, group in zip(rows, groups, strict=True)],
        "tags": [row.tag for row in rows],
        "exp_name": [row.metadata.get("exp_name", exp_name) for row in rows],
        "traj_id": [row.traj_id for row in rows],
        "traj_group_id": groups,
        "step": [row.place for row in rows],
        "interaction_id": [row.sample.interaction_id for row in rows],
        "state_hash": [row.state for row in rows],
        "episode_scores": [row.episode_score for row in rows],
        "messages": [as_json(messages_of(row.sample)) for row in rows],
        "tools": [as_json(tools_of(row.sample)) for row in rows],
        "trajectory_data": [as_json(row.trajectory()) for row in rows],
    }
    return {name: objects(values) for name, values in named.items()}


def _timestamp(sample: Sample) -> str:
    """The time at which the last turn was complete, in ROLL's format, in UTC."""
    ended = sample.turns[-1].get("completed_at") if sample.turns else None
    return datetime.fromtimestamp(ended or 0.0, UTC).strftime("%Y%m%d_%H%M%S_%f")


def _means(rows: Sequence[_Row], first_token_at: Mapping[str, float]) -> dict[str, float]:
    """The mean of each metric over the sessions of a tag, and the mean response length over all tags."""
    values: dict[str, list[float]] = defaultdict(list)
    sessions: dict[str, list[_Row]] = defaultdict(list)
    for row in rows:
        sessions[row.sample.session_id].append(row)
    for of_session in sessions.values():
        first, samples = of_session[0], [row.sample for row in of_session]
        measured = session_metrics(samples, first.metrics, first.episode_score, first_token_at)
        for name, value in measured.items():
            values[f"env/{first.tag}/{name}"].append(value)
        values["env/response_length"].append(measured["response_length"])
    return {name: float(np.mean(found)) for name, found in values.items()}


def _batch(rows: Sequence[_Row], length: int | None, pad_token_id: int) -> dict[str, NDArray[Any]]:
    samples = [row.sample for row in rows]
    places = [np.arange(len(sample.input_ids)) for sample in samples]
    prompts = [place < _prompt_length(sample) for place, sample in zip(places, samples, strict=True)]
    ends = [_at_the_end(len(row.sample.input_ids), row.score) for row in rows]
    columns = {"infer_logprobs": [sample.logprobs for sample in samples], **token_columns(samples)}
    return {
        "input_ids": pad_right([sample.input_ids for sample in samples], np.int64, pad_token_id, length),
        "attention_mask": pad_right([np.ones(len(place)) for place in places], np.int64, 0, length),
        "position_ids": pad_right(places, np.int64, 0, length),
        "response_mask": pad_right([sample.loss_mask for sample in samples], np.bool_, False, length),
        "prompt_mask": pad_right(prompts, np.bool_, False, length),
        "scores": pad_right(ends, np.float32, 0.0, length),
        **{name: pad_right(values, np.float32, 0.0, length)[:, 1:] for name, values in columns.items()},
        "versions": pad_right([sample.versions for sample in samples], np.int32, -1, length),
        "weight": weights(samples),
        "step_rewards": np.array([row.last_return for row in rows], np.float32),
    }


def _prompt_length(sample: Sample) -> int:
    """The length of the prompt. A sample in which nothing was sampled is all prompt, as in ROLL."""
    spans = [turn["span"] for turn in sample.turns if turn.get("span") is not None]
    is_empty = not sample.loss_mask.any() and not any(end > start for start, end in spans)
    return len(sample.input_ids) if is_empty else prompt_length(sample)


def _at_the_end(length: int, score: float) -> NDArray[np.float32]:
    scores = np.zeros(length, np.float32)
    scores[-1] = score
    return scores
