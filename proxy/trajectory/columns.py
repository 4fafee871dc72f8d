"""The schema of each layout: names, dtypes and widths of columns, known before the first row and equal for all rows."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from proxy.side_columns.columns import SideShape
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import MROPE
from tokengrove.options.export import Images, Include, Layout, Padding

FOREST_LABELS = ("group_ids", "rows", "tokens", "row_tokens", "repeated_tokens")
"""The labels of a sequence of layout forest. Other layouts have those of `sample_row.row_labels`."""


@dataclass(frozen=True, slots=True)
class Column:
    """One array per row, of shape [width]; `width` None: any length. Rows may lack an `optional` column. With `lines`,
    the shape is [lines, width]; a flat column of any length stores one line after another.

    `instead`: the column whose values fill a row that lacks this one, in formats that need values; None: zeros. With
    `inner`, each token has an array of this shape: the shape of the column is [width, *inner].
    """

    name: str
    dtype: np.dtype[np.generic]
    width: int | None = None
    optional: bool = False
    instead: str | None = None
    lines: int | None = None
    inner: tuple[int, ...] = ()


_I32, _I64, _F32, _BOOL = (np.dtype(kind) for kind in (np.int32, np.int64, np.float32, np.bool_))


def columns_of(options: LayoutOptions) -> tuple[Column, ...]:
    """All columns of rows under these options, in order; optional columns are last."""
    layout, padding = options.layout, options.padding
    if options.forest is not None:
        return _forest(options)
    own = _tree() if layout is Layout.TREE else _tokens() if padding is None else _padded(padding)
    compared = [Column("advantages", _F32, 1)] if options.advantages is not None else []
    steps = _of_turns(options)
    ends = [Column(name, _F32, 1) for name in ("rewards", "raw_rewards", "weight")]
    width = None if padding is None else padding.prompt_length + padding.response_length
    rare = (
        Column("token_rewards", _F32, width, optional=True),
        Column("unmasked_logprobs", _F32, width, optional=True, instead="logprobs"),
    )
    positions = [Column(MROPE, _I64, width, lines=3)] if options.mrope else []
    side = (column for shape in options.columns for column in _side(shape, width))
    return (*own, *ends, *compared, *steps, *positions, *side, *rare)


def _of_turns(options: LayoutOptions) -> list[Column]:
    asked = {"step_advantages": options.step_advantages, "turn_advantages": options.turn_advantages}
    return [Column(name, _F32) for name, how in asked.items() if how is not None]


def side_names(options: LayoutOptions) -> list[str]:
    """The names of the arrays of side columns."""
    return [column.name for shape in options.columns for column in _side(shape, None)]


def _side(shape: SideShape, width: int | None) -> Iterable[Column]:
    if shape.ragged:
        return (Column(f"{shape.name}_ids", shape.dtype), Column(f"{shape.name}_counts", _I32, width))
    return (Column(shape.name, shape.dtype, width, inner=shape.inner),)


def text_labels(options: LayoutOptions) -> tuple[str, ...]:
    """The labels that only some options add to a row."""
    side, images = bool(options.columns), options.images is not Images.NONE
    if options.forest is not None:
        told = {**dict.fromkeys(FOREST_LABELS, True), "images": images, "replay": side}
        return tuple(name for name, asked in told.items() if asked)
    text = Include.TEXT in options.include and options.layout is not Layout.TREE
    told = {"truncated_tokens": options.padding is not None, "text": text, "images": images, "replay": side}
    told["route"] = options.labels_route
    return tuple(name for name, asked in told.items() if asked)


def _tokens() -> Iterable[Column]:
    return (
        Column("input_ids", _I32),
        Column("loss_mask", _I32),
        Column("logprobs", _F32),
        Column("versions", _I32),
        Column("turn_ids", _I32),
        Column("attention_mask", _BOOL),
    )


def _tree() -> Iterable[Column]:
    nodes = ("node_offsets", "node_parents", "node_positions")
    return (
        *_tokens(),
        Column("position_ids", _I32),
        *(Column(name, _I32) for name in nodes),
        *(Column(name, _F32) for name in ("node_rewards", "node_returns")),
    )


def _forest(options: LayoutOptions) -> tuple[Column, ...]:
    compared = [Column("advantages", _F32), Column("row_advantages", _F32)] if options.advantages is not None else []
    steps = _of_turns(options)
    ends = ("row_rewards", "row_raw_rewards", "row_weights")
    return (
        *(each for each in _tokens() if each.name != "attention_mask"),
        *(Column(name, _I32) for name in ("row_ids", "parent", "tin", "tout", "position_ids", "row_ends")),
        *(Column(name, _F32) for name in ("rewards", *ends)),
        *compared,
        *steps,
        *([Column(MROPE, _I64, lines=3)] if options.mrope else []),
        *(column for shape in options.columns for column in _side(shape, None)),
        Column("token_rewards", _F32, optional=True),
        Column("unmasked_logprobs", _F32, optional=True),
    )


def _padded(padding: Padding) -> Iterable[Column]:
    prompt, response = padding.prompt_length, padding.response_length
    both = prompt + response
    return (
        Column("prompts", _I64, prompt),
        Column("responses", _I64, response),
        Column("response_mask", _I64, response),
        *(Column(name, _I64, both) for name in ("input_ids", "attention_mask", "position_ids")),
        *(Column(name, _F32, response) for name in ("rollout_log_probs", "rm_scores")),
        Column("__num_turns__", _I32, 1),
        *(Column(name, _I64, 1) for name in ("prompt_lengths", "response_lengths")),
        Column("loss_mask", _I32, both),
        Column("logprobs", _F32, both),
        *(Column(name, _I32, both) for name in ("versions", "turn_ids")),
    )
