"""Samples as a Hugging Face `datasets.Dataset`: one row per sample, and a column for each field of a sample.

Arrays are typed lists, nested fields are JSON text. No field is left out: a field that only some samples have is null
in the other rows. Images are a column of `datasets.Image`, with their bytes unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import orjson

from tokengrove.client.adapters import vision
from tokengrove.client.adapters.parts import Sessions
from tokengrove.client.libraries import library
from tokengrove.client.values import Json, Sample

_LISTS = {
    "input_ids": "int32",
    "loss_mask": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "turn_ids": "int32",
    "attention_mask": "bool",
    "returns": "float32",
}
_NUMBERS = ("reward", "raw_reward", "weight", "advantage")
_TEXTS = ("session_id", "interaction_id", "group_id", "task_id", "purpose", "agent", "finish_reason")
_NESTED = ("sampling", "turns")
# Fields without a column of their own: arrays of one number that `_NUMBERS` covers, `extra`, and the fields of images.
_SHOWN = ("rewards", "raw_rewards", "weight", "advantages", "extra", "images", "image_table", "image_spans")


def to_dataset(
    samples: Sequence[Sample], *, sessions: Sessions | None = None, images: vision.Images | None = None
) -> Any:
    """Return a Dataset of B rows. L is the length of a sample, T its number of turns.

    Lists of L: `input_ids`, `loss_mask`, `versions`, `turn_ids` int32, `logprobs`, `returns` float32, `attention_mask`
    bool. float32: `reward`, `raw_reward`, `weight`, `advantage` (null without `advantages`). Text: the ids, `purpose`,
    `agent`, `finish_reason`; `interaction_ids` is a list of T texts; `sampling` and `turns` are JSON text, because
    their fields differ between rows. Every other field of the samples follows under its own name, arrays
    (`step_advantages`, `token_rewards`, the columns of layouts tree and padded) with their own dtypes. With `sessions`
    (`Export.sessions`), `session` is the JSON text of the session's entry: its certificate, metadata and metrics.

    With `images` (`Export.images`), the column `images` has the images of each sample, a list of `datasets.Image`. If
    any sample has images, `image_spans` is JSON text: their digests, sizes, and tokens in `input_ids`. Each array of
    the processor's output (`multi_modal_inputs`) has a column, as lists of numbers. Raises InvalidRequest if datasets
    is not installed, and for an image that is not among `images`.
    """
    datasets = library("datasets")
    value = datasets.Value
    columns = {name: (value_type, values) for name, value_type, values in _columns(samples, datasets)}
    columns |= {name: (value_type, values) for name, value_type, values in _media(samples, images, datasets)}
    if sessions is not None:
        columns["session"] = (value("string"), [_text(sessions.get(sample.session_id)) for sample in samples])
    features = datasets.Features({name: kind for name, (kind, _) in columns.items()})
    return datasets.Dataset.from_dict({name: values for name, (_, values) in columns.items()}, features=features)


def _columns(samples: Sequence[Sample], datasets: Any) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each column: its name, type and values."""
    value = datasets.Value
    for name, dtype in _LISTS.items():
        yield name, datasets.Sequence(value(dtype)), [getattr(sample, name) for sample in samples]
    for name in _NUMBERS:
        yield name, value("float32"), [_number(sample, name) for sample in samples]
    for name in _TEXTS:
        yield name, value("string"), [getattr(sample, name) for sample in samples]
    yield "interaction_ids", datasets.Sequence(value("string")), [list(sample.interaction_ids) for sample in samples]
    for name in _NESTED:
        yield name, value("string"), [_text(getattr(sample, name)) for sample in samples]
    rest = [_rest(sample) for sample in samples]
    for name in dict.fromkeys(name for row in rest for name in row):
        yield name, *_typed([row.get(name) for row in rest], datasets)


def _media(
    samples: Sequence[Sample], images: vision.Images | None, datasets: Any
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield the columns of images: the images, their spans, and the arrays of the processor."""
    if images is not None:
        files = [[{"bytes": data, "path": None} for data in vision.files(sample, images)] for sample in samples]
        yield "images", datasets.Sequence(datasets.Image()), files
    if any(sample.images for sample in samples):
        yield "image_spans", datasets.Value("string"), [_text(list(sample.images)) for sample in samples]
    arrays = [vision.arrays(sample) for sample in samples]
    for name in dict.fromkeys(name for row in arrays for name in row):
        found = next(row[name] for row in arrays if name in row)
        kind = _nested(datasets.Value(found.dtype.name), found.ndim, datasets)
        yield name, kind, [row[name].tolist() if name in row else None for row in arrays]


def _nested(kind: Any, depth: int, datasets: Any) -> Any:
    """The type of lists of `kind`, nested `depth` times; with `depth` 0, `kind` itself."""
    return kind if depth == 0 else datasets.Sequence(_nested(kind, depth - 1, datasets))


def _number(sample: Sample, name: str) -> float | None:
    return float(sample.raw_rewards[0]) if name == "raw_reward" else getattr(sample, name)


def _rest(sample: Sample) -> dict[str, Json]:
    """The fields of a sample that have no column of their own."""
    own = {*_LISTS, *_TEXTS, *_NESTED, *_SHOWN, "interaction_ids", "multi_modal_inputs"}
    plain = {each.name: getattr(sample, each.name) for each in fields(sample) if each.name not in own}
    return {**plain, **{name: value for name, value in sample.extra.items() if name not in own}}


def _typed(values: list[Json], datasets: Any) -> tuple[Any, list[Any]]:
    """The type and values of a column: arrays as lists, numbers and texts unchanged, anything else as JSON text."""
    value, found = datasets.Value, [each for each in values if each is not None]
    if found and all(isinstance(each, np.ndarray) for each in found):
        kind = _nested(value(found[0].dtype.name), found[0].ndim, datasets)
        return kind, [each if each is None or each.ndim < 2 else each.tolist() for each in values]
    for kind, dtype in ((bool, "bool"), (int, "int64"), (float, "float64"), (str, "string")):
        if all(type(each) is kind for each in found) and found:
            return value(dtype), values
    return value("string"), [None if each is None else _text(each) for each in values]


def _text(entry: Json) -> str:
    """JSON text; arrays become lists."""
    return orjson.dumps(entry, option=orjson.OPT_SERIALIZE_NUMPY).decode()
