"""Batches in verl's shapes: columns of samples as input, padded tensors with the same columns as output."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.adapters.parts import objects
from tokengrove.client.adapters.verl import VerlBatch, tensors, timing
from tokengrove.errors import InvalidRequest
from tokengrove.verl.experts import columns as expert_columns
from tokengrove.verl.outputs import AgentLoopOutput
from tokengrove.verl.vision import columns as vision_columns

# Extra fields that every batch has, so that batches of different loops can be concatenated.
_EXTRA = ("turn_scores", "tool_rewards", "min_global_steps", "max_global_steps", "extras")
_SCORES = "reward_extra_info"


@dataclass(frozen=True, slots=True)
class Prompts:
    """A batch of samples. `columns`: one value per sample in each; `meta`: its `meta_info`."""

    columns: dict[str, Sequence[Any]]
    meta: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Any) -> Prompts:
        """Read a DataProto, a VerlBatch, a mapping with `non_tensor_batch` and `meta_info`, a mapping of columns (with
        an optional `meta_info`), or a list of samples, each a mapping. Every sample needs `raw_prompt`, its messages.

        Raises InvalidRequest for other types, columns of different lengths, and samples without messages.
        """
        if isinstance(batch, Mapping):
            columns, meta = batch.get("non_tensor_batch", batch), batch.get("meta_info") or {}
        elif hasattr(batch, "non_tensor_batch"):
            columns, meta = batch.non_tensor_batch, batch.meta_info or {}
        elif isinstance(batch, Sequence) and all(isinstance(sample, Mapping) for sample in batch):
            columns, meta = _columns(batch), {}
        else:
            message = (
                f"a batch is a DataProto, a VerlBatch, a mapping of columns or a list of samples, not {batch!r:.80}"
            )
            raise InvalidRequest(message, param="batch")
        columns = {name: column for name, column in columns.items() if name != "meta_info"}
        return cls(_checked(columns), meta)

    def __len__(self) -> int:
        return len(self.columns["raw_prompt"])

    def sample(self, row: int) -> dict[str, Any]:
        """The values of one sample."""
        return {name: column[row] for name, column in self.columns.items()}

    @property
    def greedy(self) -> bool:
        """Whether the batch requests greedy sampling, as verl's trainer does for the baseline of ReMax."""
        return self.meta.get("do_sample", True) is False

    def repeated(self, n: int, name: str) -> Prompts:
        """Each sample `n` times, adjacent and as a group; the batch itself if its samples are already repeated.

        Samples are repeated if two share a `uid`, or without a `uid` an `index`, or without both the same messages. If
        the size of a repeated group is not a multiple of `n`, a warning names the setting `name`. Samples whose `uid`
        is None get a new one, and a batch without `index` gets the numbers of its samples.
        """
        if n == 1 or self.greedy:
            return self
        sizes = Counter(self._groups()).values()
        if max(sizes) > 1:
            if wrong := sorted(size for size in set(sizes) if size % n):
                warnings.warn(
                    f"{name} is {n}, but the batch has a group of {wrong[0]} samples, and is used unchanged; give each "
                    f"sample once, or {n} times",
                    stacklevel=2,
                )
            return self
        columns: dict[str, Any] = {"index": list(range(len(self))), **self.columns}
        if "uid" in columns:
            columns["uid"] = [uuid4().hex if uid is None else uid for uid in columns["uid"]]
        rows = [row for row in range(len(self)) for _ in range(n)]
        repeated: dict[str, Any] = {**Prompts(columns).kept(rows)}
        return Prompts(repeated, self.meta)

    def _groups(self) -> list[str]:
        """The key of each sample's group: its `uid`, its `index`, or if it is None its messages."""
        names = [name for name in ("uid", "index") if name in self.columns]
        messages = [repr(list(each)) for each in self.columns["raw_prompt"]]
        if not names:
            return messages
        given = self.columns[names[0]]
        return [text if each is None else f"{names[0]} {each}" for each, text in zip(given, messages, strict=True)]

    def kept(self, rows: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The columns of some samples as arrays; columns that are arrays keep their dtype."""
        return {
            name: column[list(rows)] if isinstance(column, np.ndarray) else objects([column[row] for row in rows])
            for name, column in self.columns.items()
        }


def _columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for sample in samples for name in sample)
    return {name: [sample.get(name) for sample in samples] for name in names}


def _checked(columns: dict[str, Any]) -> dict[str, Any]:
    prompts = columns.get("raw_prompt")
    if not columns or (prompts is not None and not len(prompts)):
        raise InvalidRequest("the batch has no samples: its 'raw_prompt' is empty", param="raw_prompt")
    if prompts is None:
        message = f"the batch has no 'raw_prompt', the messages of each sample; its columns are {', '.join(columns)}"
        raise InvalidRequest(message, param="raw_prompt")
    for name, column in columns.items():
        if len(column) != len(prompts):
            message = f"column {name!r} has {len(column)} values, and 'raw_prompt' has {len(prompts)}"
            raise InvalidRequest(message, param=name)
    for row, messages in enumerate(prompts):
        if isinstance(messages, str | Mapping) or messages is None or not len(messages):
            raise InvalidRequest(f"'raw_prompt' of sample {row} is not a list of messages", param="raw_prompt")
    return columns


def check_lengths(output: AgentLoopOutput, prompt_length: int, response_length: int) -> None:
    """Raise InvalidRequest if an output does not fit the tensors: outputs are never truncated silently."""
    for name, ids, most in (
        ("prompt", output.prompt_ids, prompt_length),
        ("response", output.response_ids, response_length),
    ):
        if len(ids) > most:
            message = (
                f"the loop returned {len(ids)} '{name}_ids', and actor_rollout_ref.rollout.{name}_length is {most}"
            )
            raise InvalidRequest(message, param=f"{name}_ids")


def padded_outputs(
    outputs: Sequence[AgentLoopOutput],
    columns: Mapping[str, NDArray[Any]],
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> VerlBatch:
    """The tensors that verl's AgentLoopWorker makes of outputs. The outputs must fit the lengths (`check_lengths`).

    `batch`: `prompts` [B, P], padded on the left, `responses` [B, R], padded on the right, `response_mask`,
    `input_ids`, `attention_mask`, `position_ids`; `rollout_log_probs` if all outputs have logprobs; `rm_scores` if all
    outputs have a reward, which is at the last token of the response; `routed_experts` [B, P + R, layers, k] if the
    outputs have experts. `non_tensor_batch`: `columns`, `__num_turns__`,
    `session_id`, `stop_reason`, and the extra fields of the outputs; each entry of `reward_extra_info` has a column of
    its own. If an output has images, `position_ids` is [B, 4, P + R], and `multi_modal_inputs` has a dict of tensors
    for each row. `meta_info`: `metrics`, one dict per row, and `reward_extra_keys` if there are `rm_scores`.
    """
    names = ["response_mask"]
    names += ["rollout_log_probs"] if all(output.response_logprobs is not None for output in outputs) else []
    names += ["rm_scores"] if all(output.reward_score is not None for output in outputs) else []
    batch = tensors([_row(output) for output in outputs], prompt_length, response_length, pad_token_id, names)
    batch |= expert_columns(outputs, batch["prompts"].shape[1], batch["attention_mask"].shape[1])
    media = vision_columns(outputs, batch["attention_mask"], batch["prompts"].shape[1])
    if "position_ids" in media:
        batch["position_ids"] = media.pop("position_ids")
    scores = [output.extra_fields.get(_SCORES) or {} for output in outputs]
    extra = dict.fromkeys((*_EXTRA, *(name for output in outputs for name in output.extra_fields if name != _SCORES)))
    others: dict[str, NDArray[Any]] = {
        **columns,
        **media,
        **{name: objects([output.extra_fields.get(name) for output in outputs]) for name in extra},
        **{name: np.array([each.get(name) for each in scores]) for name in (scores[0] if scores else ())},
        "session_id": objects([output.session_id for output in outputs]),
        "stop_reason": objects([output.stop_reason for output in outputs]),
        "__num_turns__": np.array([output.num_turns for output in outputs], np.int32),
    }
    about: dict[str, Any] = {"metrics": [output.metrics.model_dump() for output in outputs]}
    if "rm_scores" in batch:  # else verl's trainer adds the scores later, with keys of its own
        about["reward_extra_keys"] = list(scores[0] if scores else ())
    return VerlBatch(batch, others, about)


def _row(output: AgentLoopOutput) -> dict[str, NDArray[Any]]:
    rewards = np.zeros(len(output.response_ids), np.float32)
    if len(rewards) and output.reward_score is not None:
        rewards[-1] = output.reward_score
    return {
        "prompts": np.array(output.prompt_ids, np.int64),
        "responses": np.array(output.response_ids, np.int64),
        "response_mask": np.array(output.response_mask, np.int64),
        "rollout_log_probs": np.array(output.response_logprobs or [], np.float32),
        "rm_scores": rewards,
    }


def timed(batch: VerlBatch) -> VerlBatch:
    """The batch with `timing` in place of the metrics of its rows, as verl's AgentLoopManager returns it."""
    about = {name: value for name, value in batch.meta_info.items() if name != "metrics"}
    attention, prompts = batch.batch["attention_mask"], batch.batch["prompts"].shape[1]
    lengths = [(int(row[:prompts].sum()), int(row[prompts:].sum())) for row in attention]
    return VerlBatch(
        batch.batch, batch.non_tensor_batch, {"timing": timing(batch.meta_info["metrics"], lengths), **about}
    )


def as_given(made: VerlBatch, batch: Any) -> Any:
    """`made` as a DataProto if `batch`, from which it was made, is a DataProto."""
    is_proto = hasattr(batch, "non_tensor_batch") and not isinstance(batch, VerlBatch)
    return made.to_data_proto() if is_proto else made
