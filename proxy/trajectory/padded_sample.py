"""Samples of fixed lengths in the shape of verl's batches: prompts padded on the left, responses on the right.

The prompt is everything before the first sampled token. The response is the rest, tool results included; its mask is 1
on the tokens to train. Samples are truncated only with `on_too_long: truncate`, and the truncated tokens are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.layout_options import Keep, Padding, TooLong
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.paths import Path
from proxy.trajectory.sample_row import Columns, Labels, Weighting

# verl counts the messages of both sides: a prompt and its answer are two.
_MESSAGES_A_TURN = 2


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """A sample of layout concat. `prompt` and `response` are the indexes of its tokens that are kept."""

    sample: PathSample
    padding: Padding
    prompt: NDArray[np.intp]
    response: NDArray[np.intp]

    @property
    def truncated_tokens(self) -> int:
        """The number of tokens that were removed."""
        return len(self.sample.arrays.input_ids) - len(self.prompt) - len(self.response)

    @property
    def is_trained(self) -> bool:
        return bool(self.sample.arrays.loss_mask[self.response].any())

    def with_weighting(self, weighting: Weighting) -> PaddedSample:
        return replace(self, sample=replace(self.sample, weighting=weighting))

    def labels(self) -> Labels:
        """The sample's labels. The `span` of a turn refers to the sample before padding and truncation."""
        return {**self.sample.labels(), "truncated_tokens": self.truncated_tokens}

    def columns(self) -> Columns:
        """The columns of verl's batches and of other layouts; P and R are the padded prompt and response lengths.

        int64: prompts [P], responses and response_mask [R], input_ids, attention_mask and position_ids [P + R],
        prompt_lengths and response_lengths [1]. float32: rollout_log_probs and rm_scores [R], logprobs [P + R]. int32:
        loss_mask, versions and turn_ids [P + R], __num_turns__ [1]. `rm_scores` is the sample's reward at the last
        token of the response, else 0. `__num_turns__` counts messages.
        """
        attention = self._both(np.ones(len(self.sample.arrays.input_ids), np.int64), 0)
        arrays = self.sample.arrays
        prompts, responses = self._split(self._both(arrays.input_ids.astype(np.int64), self.padding.pad_token_id))
        logprobs = self._both(arrays.logprobs, 0)
        mask = self._both(arrays.loss_mask, 0)
        found: Columns = {
            "prompts": prompts,
            "responses": responses,
            "response_mask": self._split(mask)[1].astype(np.int64),
            "input_ids": np.concatenate([prompts, responses]),
            "attention_mask": attention,
            "position_ids": np.maximum(np.cumsum(attention) - 1, 0),
            "rollout_log_probs": self._split(logprobs)[1],
            "rm_scores": self._scores(),
            "__num_turns__": np.array([_MESSAGES_A_TURN * len(self.sample.placements)], np.int32),
            "prompt_lengths": np.array([len(self.prompt)], np.int64),
            "response_lengths": np.array([len(self.response)], np.int64),
            "loss_mask": mask,
            "logprobs": logprobs,
            "versions": self._both(arrays.versions, -1),
            "turn_ids": self._both(arrays.turn_ids, -1),
        }
        plain = self.sample.columns()
        found.update({name: plain[name] for name in plain if name in _UNPADDED})
        if "token_rewards" in plain:
            found["token_rewards"] = self._both(plain["token_rewards"], 0)
        return found

    def _both(self, values: NDArray[Any], fill: int) -> NDArray[Any]:
        """Pad an array of the sample to [P + R]."""
        width, pads = self.padding.prompt_length, self.padding.prompt_length - len(self.prompt)
        out = np.full(width + self.padding.response_length, fill, values.dtype)
        out[pads:width] = values[self.prompt]
        out[width : width + len(self.response)] = values[self.response]
        return out

    def _split(self, both: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        return both[: self.padding.prompt_length], both[self.padding.prompt_length :]

    def _scores(self) -> NDArray[np.float32]:
        scores = np.zeros(self.padding.response_length, np.float32)
        if len(self.response):
            scores[len(self.response) - 1] = self.sample.rewards[0]
        return scores


_UNPADDED = ("rewards", "raw_rewards", "weight", "advantages", "step_advantages")


def fits(path: Path, padding: Padding) -> bool:
    """Whether the sample of a path is kept: it is short enough, or may be truncated."""
    prompt = _prompt_length(path.starts, len(path.ids))
    short = prompt <= padding.prompt_length and len(path.ids) - prompt <= padding.response_length
    return short or padding.on_too_long is TooLong.TRUNCATE


def pad(sample: PathSample, padding: Padding) -> PaddedSample:
    """Choose the tokens that are kept of a sample; all of them if it fits."""
    length = len(sample.arrays.input_ids)
    first = _prompt_length([placed.start for placed in sample.placements], length)
    prompt, response = np.arange(first), np.arange(first, length)
    kept = prompt[max(first - padding.prompt_length, 0) :]
    return PaddedSample(sample, padding, kept, _cut(response, padding.response_length, padding.keep))


def _prompt_length(starts: Sequence[int | None], length: int) -> int:
    """The number of tokens before the first sampled one."""
    return min((start for start in starts if start is not None), default=length)


def _cut(response: NDArray[np.intp], most: int, keep: Keep) -> NDArray[np.intp]:
    spare = max(len(response) - most, 0)
    start = {Keep.HEAD: 0, Keep.MIDDLE: spare // 2, Keep.TAIL: spare}[keep]
    return response[start : start + most]
