"""JSON formats: `json`, `jsonl`, and `areal`, which has tensors as base64 of their bytes."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.forest import PackedSequence, sequence_of
from tokengrove.client.images import ImageTable, table_of
from tokengrove.client.readers.page import Page, Source, content, page_of, parsed
from tokengrove.client.values import Json, Sample, by_id, own_images, sample_of, with_images


def read_json(source: Source) -> Page:
    return page_of(parsed(content(source)))


def read_jsonl(source: Source) -> Page:
    """Read one sample per line, then one image per line. The last line of an answer has the session entries.

    A file may contain samples only.
    """
    samples: list[Sample] = []
    sequences: list[PackedSequence] = []
    last = None
    images: ImageTable = {}
    for line in _lines(source):
        entry = parsed(line)
        if last is not None:
            raise ValueError("a line follows the last one")
        if "tin" in entry:
            sequences.append(sequence_of(entry))
        elif "input_ids" in entry:
            samples.append(sample_of(entry))
        elif "image" in entry:
            images |= table_of({entry.pop("image"): entry})
        else:
            last = entry
    if last is None and isinstance(source, bytes):
        raise ValueError("its last line is missing")
    last = last or {"sessions": []}
    if images:
        samples = [with_images(sample, images) for sample in samples]
        sequences = [replace(each, image_table=own_images(each.images, images)) for each in sequences]
    return Page(samples, by_id(last.pop("sessions")), last, images, sequences)


def _lines(source: Source) -> Iterator[bytes]:
    if isinstance(source, bytes):
        yield from source.splitlines()
        return
    with source.open("rb") as file:
        yield from file


def read_areal(source: Source) -> Page:
    """Read AReaL's tensors. Turn ids, raw reward and weight, which AReaL lacks, are derived from the labels."""
    answer = parsed(content(source))
    found = answer.pop("interactions")
    rows = [_row(labels, found[labels["interaction_id"]]["tensor_dict"]) for labels in answer["samples"]]
    trained = Counter(row["session_id"] for row in rows if row["loss_mask"].any())
    for row in rows:
        row["weight"] = [1 / trained[row["session_id"]] if row["loss_mask"].any() else 0.0]
    return page_of({**answer, "samples": rows})


def _row(labels: Mapping[str, Json], tensors: Mapping[str, Json]) -> dict[str, Any]:
    arrays = {name: _tensor(value) for name, value in tensors.items()}
    columns = {name: array if name == "rewards" else array[0] for name, array in arrays.items()}
    turns = labels["turns"]
    return {**labels, **columns, "turn_ids": _turn_ids(columns["loss_mask"], turns), "raw_rewards": [_raw(turns[-1])]}


def _turn_ids(loss_mask: NDArray[Any], turns: list[Mapping[str, Json]]) -> NDArray[np.int32]:
    turn_ids = np.full(len(loss_mask), -1, np.int32)
    for number, turn in enumerate(turns):
        if turn["span"] is not None:
            span = slice(*turn["span"])
            turn_ids[span][loss_mask[span] == 1] = number
    return turn_ids


def _raw(turn: Mapping[str, Json]) -> float:
    return float(turn["reward"] or 0.0)


def _tensor(told: Mapping[str, Json]) -> NDArray[Any]:
    dtype = np.dtype(told["dtype"].removeprefix("torch.")).newbyteorder("<")
    values = np.frombuffer(base64.b64decode(told["data"], validate=True), dtype)
    return values.reshape(told["shape"]).astype(dtype.newbyteorder("="))
