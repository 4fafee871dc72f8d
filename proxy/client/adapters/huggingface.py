"""Samples as a Hugging Face `datasets.Dataset`: one row per sample, arrays as typed lists, nested fields as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.client.libraries import library
from proxy.client.values import Sample

_LISTS = {
    "input_ids": "int32",
    "loss_mask": "int32",
    "logprobs": "float32",
    "versions": "int32",
    "turn_ids": "int32",
    "attention_mask": "bool",
}
_TEXTS = ("session_id", "interaction_id", "group_id", "task_id", "purpose", "finish_reason")
_NESTED = ("sampling", "turns")


def to_dataset(samples: Sequence[Sample]) -> Any:
    """Return a Dataset with the samples' arrays, `reward` and `raw_reward` float32, `interaction_ids` and the ids.

    `sampling` and `turns` are JSON text, because their fields differ from row to row. Raises InvalidRequest without
    datasets.
    """
    datasets = library("datasets")
    value = datasets.Value
    types: dict[str, Any] = {name: datasets.Sequence(value(dtype)) for name, dtype in _LISTS.items()}
    types |= {"reward": value("float32"), "raw_reward": value("float32"), "recomputable": value("bool")}
    types |= {"interaction_ids": datasets.Sequence(value("string"))}
    types |= {name: value("string") for name in (*_TEXTS, *_NESTED)}
    columns: dict[str, list[Any]] = {name: [getattr(sample, name) for sample in samples] for name in (*_LISTS, *_TEXTS)}
    columns["reward"] = [float(sample.rewards[0]) for sample in samples]
    columns["raw_reward"] = [float(sample.raw_rewards[0]) for sample in samples]
    columns["recomputable"] = [sample.recomputable for sample in samples]
    columns["interaction_ids"] = [list(sample.interaction_ids) for sample in samples]
    columns |= {name: [orjson.dumps(getattr(sample, name)).decode() for sample in samples] for name in _NESTED}
    return datasets.Dataset.from_dict(columns, features=datasets.Features(types))
