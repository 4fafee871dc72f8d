"""Batches as verl's agent loops build them: prompts padded on the left, responses on the right, or jagged.

The response begins with the first sampled token and contains everything after it. `response_mask` is 1 on the trained
tokens, so tool results and user turns are in the response with mask 0. The reward is on the last token of the response
or, on request, per turn or per token.

Samples of a vision model also have the other inputs of verl's actors: `multi_modal_inputs`, and positions of four rows:
text, time, height and width.

Samples with experts have verl's `routed_experts`, one row per token of prompt and response, as in verl's
`experimental/agent_loop/agent_loop.py` and `utils/megatron/router_replay_utils.py` (1dda039, August 2026), and as
uni-agent puts them into the transfer queue (`uni_agent/framework/framework.py`, 6f4a7c9). verl has no field for kept
sets, and no value for a missing row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.adapters import parts, replay, vision
from tokengrove.client.adapters.parts import (
    Annotation,
    Sessions,
    agent_time,
    answer_times,
    group_of,
    messages_of,
    metadata_of,
    numeric_metrics,
    objects,
    prompt_length,
    score_of,
    teacher_logprobs,
    token_columns,
    turn_rewards,
    weights,
)
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.libraries import library
from tokengrove.client.tensors import pad_left, pad_right, to_tensordict
from tokengrove.client.values import Float32, Sample
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

OnTooLong = Literal["refuse", "drop", "truncate"]
Scores = Literal["sample", "turns", "tokens"]
# verl counts the messages of both sides: its agent loops compute user_turns + assistant_turns + 1.
_MESSAGES_A_TURN = 2
# The response columns that every batch has.
_OF_ALL = ("response_mask", "rollout_log_probs", "rm_scores")
# The fields of verl's AgentLoopMetrics, and the columns of verl's datasets that metadata may have.
_SECONDS = ("generate_sequences", "tool_calls", "compute_score")
_TIMED = (*_SECONDS, "num_preempted")
# The streams of the columns that verl's trainer computes (verl/trainer/ppo/ray_trainer.py, rollout_corr_helper.py).
_TOLD = {
    "old_log_probs": "logprobs",
    "entropys": "entropy",
    "ref_log_prob": "ref_logprobs",
    "advantages": "advantages",
    "rollout_is_weights": "importance_weight",
    "is_masked": "is_masked",
}
_OF_DATASETS = ("data_source", "ability", "reward_model", "agent_name")


@dataclass(frozen=True, slots=True)
class VerlBatch:
    """The fields of a verl DataProto: `batch` has arrays [B, ...], `non_tensor_batch` object arrays [B].

    `non_tensor_batch`: `uid` (the group), `session_id`, `interaction_id`, `__num_turns__` int32 (messages, two per
    turn), `min_global_steps` and `max_global_steps` (weight versions of the trained tokens, -1 if there are none),
    `turn_scores` (rewards of the turns), `tool_rewards`, `extras`, `session_score`; `raw_prompt` if the export included
    messages; with `sessions`, `extra_info` (the metadata), the metadata's `data_source`, `ability`, `reward_model` and
    `agent_name` if all have them, and each metric that is a number in all sessions, float64 [B].

    For samples with images, or of a vision model: `multi_modal_inputs`, per row a dict of tensors, empty without
    images: the processor's output for its images (`pixel_values`, `image_grid_thw` [images, 3] for Qwen's models), and
    `images_seqlens`, the patches of each image. With `images`, `multi_modal_data`: per row `{"image": [PIL images]}`.

    `meta_info`: `metrics`, one dict per row, like verl's AgentLoopMetrics (seconds); `timing`, their minimum, maximum
    and mean under verl's names; `reward_extra_keys`, the names of the metrics that all sessions have.
    """

    batch: dict[str, NDArray[Any]]
    non_tensor_batch: dict[str, NDArray[Any]]
    meta_info: dict[str, Any] = field(default_factory=dict)

    def to_tensordict(self) -> TensorDict:
        """`batch` as a TensorDict."""
        return to_tensordict(self.batch)

    def to_data_proto(self) -> Any:
        """Return a `verl.DataProto`. Raises InvalidRequest without verl."""
        protocol = library("verl.protocol")
        return protocol.DataProto(
            batch=self.to_tensordict(), non_tensor_batch=self.non_tensor_batch, meta_info=self.meta_info
        )


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    prompt: slice
    response: slice
    more: Mapping[str, Float32]

    def columns(self, scores: Scores) -> dict[str, NDArray[Any]]:
        """The columns with one value per token of the prompt or of the response."""
        sample = self.sample
        return {
            "prompts": sample.input_ids[self.prompt].astype(np.int64),
            "responses": sample.input_ids[self.response].astype(np.int64),
            "response_mask": sample.loss_mask[self.response].astype(np.int64),
            "rollout_log_probs": sample.logprobs[self.response],
            "rm_scores": self._scores(scores),
            **{name: values[self.response] for name, values in self.more.items()},
        }

    def _scores(self, scores: Scores) -> Float32:
        if scores == "tokens":
            return self.more["token_rewards"][self.response]
        found = np.zeros(_length(self.response), np.float32)
        if scores == "sample":
            found[-1] = self.sample.reward
            return found
        for turn, reward in zip(self.sample.turns, turn_rewards(self.sample), strict=True):
            end = turn["span"][1] if turn.get("span") is not None else self.response.stop
            found[min(end, self.response.stop) - self.response.start - 1] += reward
        return found


def padded(
    samples: Sequence[Sample],
    *,
    sessions: Sessions | None = None,
    scores: Scores = "sample",
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_token_id: int = 0,
    on_too_long: OnTooLong = "refuse",
    images: vision.Images | None = None,
    on_missing: OnMissing = "refuse",
    teacher: str | None = None,
) -> VerlBatch:
    """`prompts` [B, P], `responses`, `response_mask` [B, R], `input_ids`, `attention_mask`, `position_ids` [B, P + R],
    all int64; float32 [B, R]: `rollout_log_probs`, `rm_scores`, `returns`, `token_rewards` and, if the export has them,
    `advantages` and `step_advantages`; `weight` float32 [B].

    `scores` selects the content of `rm_scores`: the sample's reward at the last token of the response, the reward of
    each turn at its last token (for a turn that is not in the sample, at the last token of the response), or the
    rewards of tokens. P and R default to the longest prompt and response. A longer sample is refused (InvalidRequest),
    dropped or truncated. Truncated prompts keep their end, truncated responses their beginning. Rewards of removed
    tokens move to the last remaining token; with `tokens`, they are removed. `sessions` is `Export.sessions`, for
    metadata and metrics.

    `position_ids` is [B, 4, P + R] if a sample has positions of a vision model. With `images` (`Export.images`), the
    batch also has the images. Raises InvalidRequest for a sample with images that was exported without
    `multi_modal_inputs`, or if truncation would cut off an image.

    `routed_experts` [B, P + R, layers, k], uint8, int16 or int32, if the export has experts: row t is of the pass that
    took in token t. Rows after the last captured one, on which no trained token depends, repeat it; padding, which verl
    removes before it runs the model, is 0. Raises InvalidRequest if a row is missing that a trained token needs; with
    `on_missing` leave_out, the batch has no `routed_experts` then.

    `teacher`: the name of a teacher of the export; `ref_log_prob` float32 [B, R], which verl's reference worker else
    computes, has its logprobs, 0 for tokens that are not trained. Raises InvalidRequest if a trained token has none.
    """
    more, has_images = _columns(samples, teacher), vision.has_vision(samples)
    rows = _fitting(_rows(samples, more), prompt_length, response_length, on_too_long)
    columns = [row.columns(scores) for row in rows]
    kept = [row.sample for row in rows]
    batch = tensors(columns, prompt_length, response_length, pad_token_id, (*_OF_ALL, *more))
    batch["weight"] = weights(kept)
    metrics = [_metrics(sample) for sample in kept]
    keys, others = _of_sessions(kept, sessions)
    if has_images:
        others |= _media(kept, images)
    if vision.has_positions(kept):
        batch["position_ids"] = _padded_positions(rows, batch["attention_mask"], batch["prompts"].shape[1])
    if (experts := _experts(rows, on_missing)) is not None:
        batch["routed_experts"] = padded_experts(
            experts, [_length(row.prompt) for row in rows], batch["prompts"].shape[1], batch["attention_mask"].shape[1]
        )
    lengths = [(_length(row.prompt), _length(row.response)) for row in rows]
    about = {"metrics": metrics, "timing": timing(metrics, lengths), "reward_extra_keys": keys}
    return VerlBatch(batch, {**_others(kept), **others}, about)


def annotation(samples: Sequence[Sample], data: Any) -> Annotation:
    """Arguments of `client.annotate` from a DataProto or a `VerlBatch` of these samples, before the actor's update.

    Rows are found by `interaction_id`, so verl may have reordered, repeated or removed them. Streams from float32
    [B, R]: `logprobs` (`old_log_probs`), `entropy` (`entropys`), `ref_logprobs` (`ref_log_prob`), `advantages`,
    `importance_weight` (`rollout_is_weights`) and `is_masked` from `response_mask`, which rejection sampling changes.
    Tokens that `padded` cut off have no values. Raises InvalidRequest for a row of another sample, and without any of
    these.
    """
    batch = dict(data.batch.items())
    width = batch["responses"].shape[1]
    samples = [replace(each, loss_mask=each.loss_mask[: prompt_length(each) + width]) for each in samples]
    if "response_mask" in batch:
        batch["is_masked"] = batch["response_mask"] == 0
    ids = [sample.interaction_id for sample in samples], data.non_tensor_batch["interaction_id"].tolist()
    return parts.annotation(samples, batch, _TOLD, "response", ids)


def tensors(
    columns: Sequence[Mapping[str, NDArray[Any]]],
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_token_id: int = 0,
    names: Sequence[str] = _OF_ALL,
) -> dict[str, NDArray[Any]]:
    """Pad the columns of each row: `prompts` on the left, `responses` and the columns of their tokens on the right.

    Returns `prompts` [B, P], `responses` [B, R], `input_ids`, `attention_mask`, `position_ids` [B, P + R] and the
    columns in `names` [B, R]: `response_mask` int64, others float32. P and R default to the longest; no row may be
    longer.
    """
    prompts = pad_left([row["prompts"] for row in columns], np.int64, pad_token_id, prompt_length)
    responses = pad_right([row["responses"] for row in columns], np.int64, pad_token_id, response_length)
    attention = np.concatenate(
        [
            pad_left([np.ones(len(row["prompts"])) for row in columns], np.int64, 0, prompts.shape[1]),
            pad_right([np.ones(len(row["responses"])) for row in columns], np.int64, 0, responses.shape[1]),
        ],
        axis=1,
    )
    width = responses.shape[1]
    return {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.clip(np.cumsum(attention, axis=1) - 1, 0, None),
        **{name: pad_right([row[name] for row in columns], _dtype(name), 0, width) for name in names},
    }


def padded_experts(
    experts: Sequence[NDArray[Any]], prompt_lengths: Sequence[int], prompt_width: int, width: int
) -> NDArray[Any]:
    """The experts of each row, [tokens, layers, k], as [B, width, layers, k], with zeros in the padding.

    The first row of each is that of the first token of its prompt, which ends at `prompt_width`.
    """
    batch = np.zeros((len(experts), width, *experts[0].shape[1:]), replay.torch_dtype(experts))
    for line, rows, length in zip(batch, experts, prompt_lengths, strict=True):
        start = prompt_width - length
        line[start : start + len(rows)] = rows
    return batch


def _columns(samples: Sequence[Sample], teacher: str | None) -> dict[str, list[Float32]]:
    """The further columns with one value per token, by name."""
    of_teacher = {} if teacher is None else {"ref_log_prob": [teacher_logprobs(each, teacher) for each in samples]}
    return {**token_columns(samples), **of_teacher}


def jagged(
    samples: Sequence[Sample],
    *,
    scores: Scores = "sample",
    on_missing: OnMissing = "refuse",
    teacher: str | None = None,
) -> TensorDict:
    """Return the columns of `padded` without padding, and `loss_mask`, as jagged nested tensors in a TensorDict.

    For samples of a vision model, `position_ids` has rows [4, L], and `multi_modal_inputs` one dict per sample.
    `weight` float32 and `num_turns`, `min_global_steps`, `max_global_steps` int64 are [B]. `routed_experts`, if the
    export has experts, has rows [L, layers, k]; `on_missing` and `teacher` are as in `padded`. Raises InvalidRequest
    without torch and tensordict.
    """
    torch, tensordict = library("torch"), library("tensordict")
    found, has_images = _rows(samples, _columns(samples, teacher)), vision.has_vision(samples)
    rows = [_jagged_row(row, scores) for row in found]
    if vision.has_positions(samples):
        rows = [{**row, "position_ids": _positions(of)} for row, of in zip(rows, found, strict=True)]
    if (experts := _experts(found, on_missing)) is not None:
        dtype = replay.torch_dtype(experts)
        rows = [{**row, "routed_experts": own.astype(dtype)} for row, own in zip(rows, experts, strict=True)]
    tensors: dict[str, Any] = {
        name: torch.nested.as_nested_tensor([torch.tensor(row[name]) for row in rows], layout=torch.jagged)
        for name in (rows[0] if rows else ())
    }
    others = _others(samples)
    for name in ("__num_turns__", "min_global_steps", "max_global_steps"):
        tensors[name.strip("_")] = torch.tensor(others[name].astype(np.int64))
    tensors["weight"] = torch.tensor(weights(samples))
    if has_images:
        tensors["multi_modal_inputs"] = tensordict.NonTensorStack(*[vision.verl_inputs(sample) for sample in samples])
    result: TensorDict = tensordict.TensorDict(tensors, batch_size=[len(rows)])
    return result


def _jagged_row(row: _Row, scores: Scores) -> dict[str, NDArray[Any]]:
    columns, ids = row.columns(scores), row.sample.input_ids
    return {
        **columns,
        "loss_mask": columns["response_mask"],
        "input_ids": ids.astype(np.int64),
        "position_ids": np.arange(len(ids)),
    }


def _rows(samples: Sequence[Sample], more: Mapping[str, Sequence[Float32]]) -> list[_Row]:
    rows = []
    for place, sample in enumerate(samples):
        start, own = prompt_length(sample), {name: values[place] for name, values in more.items()}
        rows.append(_Row(sample, slice(0, start), slice(start, len(sample.input_ids)), own))
    return rows


def _experts(rows: Sequence[_Row], on_missing: OnMissing) -> list[NDArray[Any]] | None:
    """The experts of the tokens of each row, [tokens of prompt and response, layers, k]; None without experts."""
    if not replay.has_experts([row.sample for row in rows]):
        return None
    whole = replay.all_or_none([row.sample for row in rows], _whole_experts, on_missing)
    if whole is None:
        return None
    return [of[row.prompt.start : row.response.stop] for of, row in zip(whole, rows, strict=True)]


def _whole_experts(sample: Sample, on_missing: OnMissing) -> NDArray[Any] | None:
    return replay.whole(sample, len(sample.input_ids), on_missing)


def _dtype(name: str) -> type[np.generic]:
    return np.int64 if name == "response_mask" else np.float32


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _fitting(rows: Sequence[_Row], prompt: int | None, response: int | None, on_too_long: OnTooLong) -> list[_Row]:
    fitting = []
    for row in rows:
        cut = _cut(row, prompt, response)
        if (cut.prompt, cut.response) == (row.prompt, row.response) or on_too_long == "truncate":
            vision.check_whole(row.sample, cut.prompt.start, cut.response.stop)
            fitting.append(cut)
        elif on_too_long == "refuse":
            raise InvalidRequest(
                f"sample {row.sample.interaction_id!r} has {_length(row.prompt)} tokens of prompt and "
                f"{_length(row.response)} of response, which do not fit; raise prompt_length or response_length, "
                "or give on_too_long='drop' or 'truncate'"
            )
    return fitting


def _cut(row: _Row, prompt: int | None, response: int | None) -> _Row:
    first, last = row.prompt.start, row.response.stop
    if prompt is not None:
        first = max(first, row.prompt.stop - prompt)
    if response is not None:
        last = min(last, row.response.start + response)
    return replace(row, prompt=slice(first, row.prompt.stop), response=slice(row.response.start, last))


def _positions(row: _Row) -> NDArray[np.int64]:
    """Positions int64 [4, L] of the tokens of a row: text, time, height and width."""
    part = slice(row.prompt.start, row.response.stop)
    of_images = vision.positions(row.sample, part)
    return np.concatenate([np.arange(of_images.shape[1])[None], of_images])


def _padded_positions(rows: Sequence[_Row], attention: NDArray[Any], width: int) -> NDArray[np.int64]:
    """Positions int64 [B, 4, P + R], with zeros in the padding. `width`: P."""
    padded = np.zeros((len(rows), 4, attention.shape[1]), np.int64)
    for line, row in zip(padded, rows, strict=True):
        start = width - _length(row.prompt)
        found = _positions(row)
        line[:, start : start + found.shape[1]] = found
    return padded


def _media(samples: Sequence[Sample], images: vision.Images | None) -> dict[str, NDArray[Any]]:
    found = {"multi_modal_inputs": objects([vision.verl_inputs(sample) for sample in samples])}
    if images is not None:
        pictures = [vision.pictures(sample, images) for sample in samples]
        found["multi_modal_data"] = objects([{"image": each} if each else {} for each in pictures])
    return found


def _others(samples: Sequence[Sample]) -> dict[str, NDArray[Any]]:
    versions = [_versions(sample) for sample in samples]
    found: dict[str, list[Any]] = {
        "uid": [group_of(sample) for sample in samples],
        "session_id": [sample.session_id for sample in samples],
        "interaction_id": [sample.interaction_id for sample in samples],
        "min_global_steps": [oldest for oldest, _ in versions],
        "max_global_steps": [newest for _, newest in versions],
        "turn_scores": [turn_rewards(sample) for sample in samples],
        "tool_rewards": [[] for _ in samples],
        "extras": [None for _ in samples],
        "session_score": [score_of(sample) for sample in samples],
    }
    if any(map(messages_of, samples)):
        found["raw_prompt"] = [list(sample.turns[0].get("messages") or ())[:-1] for sample in samples]
    turns = np.array([_MESSAGES_A_TURN * len(sample.interaction_ids) for sample in samples], np.int32)
    return {**{name: objects(values) for name, values in found.items()}, "__num_turns__": turns}


def _versions(sample: Sample) -> tuple[int, int]:
    """The oldest and the newest weight version of the trained tokens; -1 if there are none."""
    found = sample.versions[sample.loss_mask > 0]
    return (int(found.min()), int(found.max())) if len(found) else (-1, -1)


def _of_sessions(samples: Sequence[Sample], sessions: Sessions | None) -> tuple[list[str], dict[str, NDArray[Any]]]:
    """The names of the numeric metrics that all sessions have, and the columns of metadata and metrics."""
    if sessions is None:
        return [], {}
    told = [metadata_of(sample, sessions) for sample in samples]
    measured = [numeric_metrics(sample, sessions) for sample in samples]
    keys = sorted(set.intersection(*map(set, measured))) if measured else []
    columns: dict[str, NDArray[Any]] = {"extra_info": objects([dict(about) for about in told])}
    columns |= {
        name: objects([about[name] for about in told]) for name in _OF_DATASETS if all(name in about for about in told)
    }
    return keys, columns | {key: np.array([each[key] for each in measured], np.float64) for key in keys}


def _metrics(sample: Sample) -> dict[str, float]:
    """verl's AgentLoopMetrics of a sample, in seconds. Preemptions are unknown, so -1, as in verl."""
    values = (sum(answer_times(sample)), agent_time(sample), 0.0, -1)
    return dict(zip(_TIMED, values, strict=True))


def timing(metrics: Sequence[Mapping[str, float]], lengths: Sequence[tuple[int, int]]) -> dict[str, float]:
    """The summary of the metrics of all rows, as verl's AgentLoopManager computes it.

    `lengths`: tokens of prompt and response of each row. The slowest row has the largest sum of seconds.
    """
    if not metrics:
        return {}
    found: dict[str, float] = {}
    for name in _TIMED:
        values = [each[name] for each in metrics]
        for how, value in (("min", min(values)), ("max", max(values)), ("mean", float(np.mean(values)))):
            found[f"agent_loop/{name}/{how}"] = value
    slowest = max(range(len(metrics)), key=lambda row: sum(metrics[row][name] for name in _SECONDS))
    found |= {f"agent_loop/slowest/{name}": metrics[slowest][name] for name in _TIMED}
    found["agent_loop/slowest/prompt_length"], found["agent_loop/slowest/response_length"] = lengths[slowest]
    return found
