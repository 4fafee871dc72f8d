"""Batches as verl's agent loops make them: prompts padded on the left, responses on the right, or jagged.

The response begins with the first sampled token and holds everything after it. `response_mask` is 1 on the trained
tokens, so tool results and user turns are in the response with mask 0. The reward is on the last token of the response.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from proxy.client.adapters.parts import group_of, objects, prompt_length
from proxy.client.libraries import library
from proxy.client.tensors import pad_left, pad_right, to_tensordict
from proxy.client.values import Sample
from proxy.errors import InvalidRequest

if TYPE_CHECKING:
    from tensordict import TensorDict

OnTooLong = Literal["refuse", "drop", "truncate"]
# verl counts the messages of both sides: its agent loops add user_turns + assistant_turns + 1.
_MESSAGES_A_TURN = 2


@dataclass(frozen=True, slots=True)
class VerlBatch:
    """The fields of a verl DataProto: `batch` has arrays [B, ...], `non_tensor_batch` object arrays [B]."""

    batch: dict[str, NDArray[Any]]
    non_tensor_batch: dict[str, NDArray[Any]]

    def to_tensordict(self) -> TensorDict:
        """`batch` as a TensorDict."""
        return to_tensordict(self.batch)

    def to_data_proto(self) -> Any:
        """Return a `verl.DataProto`. Raises InvalidRequest without verl."""
        protocol = library("verl.protocol")
        return protocol.DataProto(
            batch=self.to_tensordict(), non_tensor_batch=self.non_tensor_batch, meta_info={"reward_extra_keys": []}
        )


@dataclass(frozen=True, slots=True)
class _Row:
    sample: Sample
    prompt: slice
    response: slice

    def columns(self) -> dict[str, NDArray[Any]]:
        """The columns with one value per token of the prompt or of the response."""
        sample, scores = self.sample, np.zeros(_length(self.response), np.float32)
        scores[-1] = sample.rewards[0]
        return {
            "prompts": sample.input_ids[self.prompt].astype(np.int64),
            "responses": sample.input_ids[self.response].astype(np.int64),
            "response_mask": sample.loss_mask[self.response].astype(np.int64),
            "rollout_log_probs": sample.logprobs[self.response],
            "rm_scores": scores,
        }


def padded(
    samples: Sequence[Sample],
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    pad_token_id: int = 0,
    on_too_long: OnTooLong = "refuse",
) -> VerlBatch:
    """`prompts` [B, P], `responses`, `response_mask` [B, R], `input_ids`, `attention_mask`, `position_ids` [B, P + R],
    all int64; `rollout_log_probs`, `rm_scores` float32 [B, R].

    P and R default to the longest prompt and response. A longer sample is refused (InvalidRequest), dropped or
    truncated: prompts keep their end, responses their beginning, and the reward moves to the last remaining token.
    `uid` is the group; `__num_turns__` int32 counts messages, two per turn, as in layout padded.
    """
    rows = _fitting([_split(sample) for sample in samples], prompt_length, response_length, on_too_long)
    columns = [row.columns() for row in rows]
    prompts = pad_left([column["prompts"] for column in columns], np.int64, pad_token_id, prompt_length)
    responses = pad_right([column["responses"] for column in columns], np.int64, pad_token_id, response_length)
    width = responses.shape[1]
    before = pad_left([np.ones(_length(row.prompt)) for row in rows], np.int64, 0, prompts.shape[1])
    after = pad_right([np.ones(_length(row.response)) for row in rows], np.int64, 0, width)
    attention = np.concatenate([before, after], axis=1)
    of_responses: dict[str, type[np.generic]] = {
        "response_mask": np.int64,
        "rollout_log_probs": np.float32,
        "rm_scores": np.float32,
    }
    batch = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": np.concatenate([prompts, responses], axis=1),
        "attention_mask": attention,
        "position_ids": np.clip(np.cumsum(attention, axis=1) - 1, 0, None),
        **{
            name: pad_right([column[name] for column in columns], dtype, 0, width)
            for name, dtype in of_responses.items()
        },
    }
    return VerlBatch(batch, _others(rows))


def jagged(samples: Sequence[Sample]) -> TensorDict:
    """Return the columns of `padded` without padding, and `loss_mask`, as jagged nested tensors in a TensorDict.

    Raises InvalidRequest without torch and tensordict.
    """
    torch, tensordict = library("torch"), library("tensordict")
    rows = [_jagged_row(sample) for sample in samples]
    nested = {
        name: torch.nested.as_nested_tensor([torch.tensor(row[name]) for row in rows], layout=torch.jagged)
        for name in (rows[0] if rows else ())
    }
    result: TensorDict = tensordict.TensorDict(nested, batch_size=[len(rows)])
    return result


def _jagged_row(sample: Sample) -> dict[str, NDArray[Any]]:
    columns = _split(sample).columns()
    return {
        **columns,
        "loss_mask": columns["response_mask"],
        "input_ids": sample.input_ids.astype(np.int64),
        "position_ids": np.arange(len(sample.input_ids)),
    }


def _split(sample: Sample) -> _Row:
    start = prompt_length(sample)
    return _Row(sample, slice(0, start), slice(start, len(sample.input_ids)))


def _length(part: slice) -> int:
    length: int = part.stop - part.start
    return length


def _fitting(rows: Sequence[_Row], prompt: int | None, response: int | None, on_too_long: OnTooLong) -> list[_Row]:
    fitting = []
    for row in rows:
        cut = _cut(row, prompt, response)
        if cut == row or on_too_long == "truncate":
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
    return _Row(row.sample, slice(first, row.prompt.stop), slice(row.response.start, last))


def _others(rows: Sequence[_Row]) -> dict[str, NDArray[Any]]:
    samples = [row.sample for row in rows]
    return {
        "uid": objects([group_of(sample) for sample in samples]),
        "session_id": objects([sample.session_id for sample in samples]),
        "interaction_id": objects([sample.interaction_id for sample in samples]),
        "__num_turns__": np.array([_MESSAGES_A_TURN * len(sample.interaction_ids) for sample in samples], np.int32),
    }
