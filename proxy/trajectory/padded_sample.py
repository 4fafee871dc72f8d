"""Samples of fixed lengths in the shape of verl's batches: prompts padded on the left, responses on the right.

The prompt is everything before the first sampled token. The response is the rest, tool results included; its mask is 1
on the tokens to train. Samples are truncated only with `on_too_long: truncate`, and the truncated tokens are counted.
An image and the token on each side of it are kept or cut off together: models reject a partial image.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.rows import joined
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.paths import Path
from proxy.trajectory.sample_row import MROPE, Columns, Labels, PositionsOf
from proxy.trajectory.side_source import SideOf, no_columns, side_arrays, side_labels
from proxy.trajectory.token_arrays import Placement, Span
from proxy.types import PlacedImage
from tokengrove.options.export import Keep, Padding, TooLong

# verl counts the messages of both sides: a prompt and its answer are two.
_MESSAGES_A_TURN = 2


@dataclass(frozen=True, slots=True)
class Window:
    """The indexes of a path's tokens that are kept. The prompt ends where the first output begins."""

    prompt: range
    response: range

    def kept(self, start: int, length: int) -> Span | None:
        """The kept part [first, end) of an output of `length` tokens at `start`; None: nothing is kept."""
        first, end = max(start, self.response.start), min(start + length, self.response.stop)
        return (first - start, end - start) if first < end or (first == end and not length) else None

    def has(self, image: PlacedImage) -> bool:
        """Whether an image is kept. No image is kept in part."""
        return any(part.start <= image.start < part.stop for part in (self.prompt, self.response))

    @property
    def cuts_context(self) -> bool:
        """Whether a token before the last kept token is cut off."""
        return self.prompt.start > 0 or self.response.start > self.prompt.stop


@dataclass(frozen=True, slots=True)
class PaddedSample:
    """A sample of layout concat whose placements are limited to `window`: only kept tokens are trained."""

    sample: PathSample
    padding: Padding
    window: Window

    @property
    def truncated_tokens(self) -> int:
        """The number of tokens that were removed."""
        return len(self.sample.arrays.input_ids) - len(self.window.prompt) - len(self.window.response)

    @property
    def is_trained(self) -> bool:
        return self.sample.is_trained

    @property
    def placements(self) -> tuple[Placement, ...]:
        return self.sample.placements

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The kept images, with their places in the padded row."""
        kept = [image for image in self.sample.images if self.window.has(image)]
        return tuple(image._replace(start=image.start + self._shift(image.start)) for image in kept)

    def with_weight(self, weight: float) -> PaddedSample:
        return replace(self, sample=self.sample.with_weight(weight))

    def labels(self) -> Labels:
        """The sample's labels. The `span` of a turn is the range of its kept output in the padded row."""
        labels = replace(self.sample, images=self.images, side=no_columns).labels()
        labels |= side_labels(self._side(), {of: self._both(each, 0) for of, each in self.sample.expected.items()})
        shift = self._shift(self.window.response.start)
        for turn in labels["turns"]:
            turn["span"] = None if turn["span"] is None else [at + shift for at in turn["span"]]
        return {**labels, "truncated_tokens": self.truncated_tokens}

    def columns(self) -> Columns:
        """The columns of verl's batches and of the other layouts; P and R are the padded prompt and response lengths.

        int64: prompts [P], responses and response_mask [R], input_ids, attention_mask and position_ids [P + R],
        prompt_lengths and response_lengths [1]. float32: rollout_log_probs and rm_scores [R], logprobs [P + R]. int32:
        loss_mask, versions and turn_ids [P + R], __num_turns__ [1]. `rm_scores` is the sample's reward at the last
        token of the response, else 0. `__num_turns__` counts messages. With positions, there is also
        mrope_position_ids, int64 [3, P + R].
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
            "prompt_lengths": np.array([len(self.window.prompt)], np.int64),
            "response_lengths": np.array([len(self.window.response)], np.int64),
            "loss_mask": mask,
            "logprobs": logprobs,
            "versions": self._both(arrays.versions, -1),
            "turn_ids": self._both(arrays.turn_ids, -1),
        }
        plain = replace(self.sample, positions=None, side=no_columns).columns()
        found.update({name: plain[name] for name in plain if name in _UNPADDED})
        found.update({name: self._both(plain[name], 0) for name in _OPTIONAL if name in plain})
        if self.sample.positions is not None:
            found[MROPE] = self._positions(self.sample.positions)
        return {**found, **side_arrays(self._side())}

    def _side(self) -> SideOf:
        """The side columns, padded to [P + R] with missing rows."""
        prompt, response, padding = self.window.prompt, self.window.response, self.padding
        return {
            name: joined(
                [
                    rows.blank(padding.prompt_length - len(prompt)),
                    rows[prompt.start : prompt.stop],
                    rows[response.start : response.stop],
                    rows.blank(padding.response_length - len(response)),
                ]
            )
            for name, rows in self.sample.side().items()
        }

    def _both(self, values: NDArray[Any], fill: int) -> NDArray[Any]:
        """Pad an array of the sample to [P + R]."""
        prompt, response, width = self.window.prompt, self.window.response, self.padding.prompt_length
        out = np.full(width + self.padding.response_length, fill, values.dtype)
        out[width - len(prompt) : width] = values[prompt.start : prompt.stop]
        out[width : width + len(response)] = values[response.start : response.stop]
        return out

    def _positions(self, positions_of: PositionsOf) -> NDArray[np.int64]:
        """The positions of the kept tokens, counted as one sequence, [3, P + R]; 0 in the padding."""
        first, length = self.padding.prompt_length - len(self.window.prompt), len(self.window.prompt)
        length += len(self.window.response)
        out = np.zeros((3, self.padding.prompt_length + self.padding.response_length), np.int64)
        kept = [image._replace(start=image.start - first) for image in self.images]
        out[:, first : first + length] = positions_of(kept, length)
        return out

    def _shift(self, at: int) -> int:
        """How far a kept token moves in the padded row."""
        width = self.padding.prompt_length
        return width - (self.window.prompt.stop if at < self.window.prompt.stop else self.window.response.start)

    def _split(self, both: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        return both[: self.padding.prompt_length], both[self.padding.prompt_length :]

    def _scores(self) -> NDArray[np.float32]:
        scores = np.zeros(self.padding.response_length, np.float32)
        if len(self.window.response):
            scores[len(self.window.response) - 1] = self.sample.rewards[0]
        return scores


_OPTIONAL = ("token_rewards", "unmasked_logprobs")
_UNPADDED = ("rewards", "raw_rewards", "weight", "advantages", "step_advantages", "turn_advantages")


def window_of(path: Path, padding: Padding) -> Window | None:
    """The part of a path that padding keeps: all of it if it fits; None if it is too long and may not be truncated."""
    length = len(path.ids)
    first = min((start for start in path.starts if start is not None), default=length)
    fits = first <= padding.prompt_length and length - first <= padding.response_length
    if not fits and padding.on_too_long is not TooLong.TRUNCATE:
        return None
    spare = max(length - first - padding.response_length, 0)
    start = first + {Keep.HEAD: 0, Keep.MIDDLE: spare // 2, Keep.TAIL: spare}[padding.keep]
    begin, stop = max(first - padding.prompt_length, 0), min(start + padding.response_length, length)
    blocks = _blocks(path.images)
    begin = _later(begin, blocks) if begin else begin
    start = _later(start, blocks) if start > first else start
    stop = _earlier(stop, blocks) if stop < length else stop
    return Window(range(min(begin, first), first), range(start, max(start, stop)))


def _blocks(images: Sequence[PlacedImage]) -> list[Span]:
    """The tokens [first, end) of each image and one token on each side, with which most models surround an image."""
    befores = [0, *(image.start + image.length for image in images)]
    afters = [*(image.start for image in images[1:]), sys.maxsize]
    return [
        (max(image.start - 1, before), min(image.start + image.length + 1, after))
        for image, before, after in zip(images, befores, afters, strict=False)
    ]


def _later(at: int, blocks: Sequence[Span]) -> int:
    """The first place to cut at or after this token that divides no block."""
    for first, end in blocks:
        at = end if first < at < end else at
    return at


def _earlier(at: int, blocks: Sequence[Span]) -> int:
    """The last place to cut at or before this token that divides no block."""
    for first, end in reversed(blocks):
        at = first if first < at < end else at
    return at
