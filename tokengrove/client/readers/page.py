"""One page of an export, independent of its format: samples, an entry per session, and the fields of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokengrove.client.export import Export
from tokengrove.client.forest import PackedSequence, counts_of, sequence_of
from tokengrove.client.images import ImageTable, table_of
from tokengrove.client.values import Json, Sample, by_id, sample_of

Source = bytes | Path
"""The bytes of an answer, or the file that contains them."""
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Page:
    """One answer. `end` has `cursor`, which names the next page, and the fields of a claim."""

    samples: list[Sample]
    sessions: dict[str, dict[str, Json]]
    end: Mapping[str, Json]
    images: ImageTable = field(default_factory=dict)
    sequences: list[PackedSequence] = field(default_factory=list)

    @property
    def export(self) -> Export:
        forest = dict(self.end.get("forest") or (counts_of(self.sequences) if self.sequences else {}))
        return Export(self.samples, self.sessions, images=self.images, sequences=self.sequences, forest=forest)


def page_of(answer: Mapping[str, Json], images: ImageTable | None = None) -> Page:
    """Build a page from `{"samples": [...], "sessions": [...], ...}`; the other fields become `end`.

    `images`: images of the samples; None: those in the answer's field `images`.
    """
    table = table_of(answer.get("images", {})) if images is None else images
    end = {name: value for name, value in answer.items() if name not in ("samples", "sessions", "images")}
    samples = [sample_of(entry, table) for entry in answer["samples"] if "tin" not in entry]
    sequences = [sequence_of(entry, table) for entry in answer["samples"] if "tin" in entry]
    return Page(samples, by_id(answer["sessions"]), end, table, sequences)


def without_images(arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Remove the arrays of images, which have a slash in their names, from the arrays of a file, and return them."""
    return {name: arrays.pop(name) for name in [name for name in arrays if "/" in name]}


def parsed(text: bytes) -> dict[str, Json]:
    """Decode a JSON object. Raises ValueError for anything else."""
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is not a JSON object")
    return value


_OPTIONAL = ("token_rewards", "unmasked_logprobs")


def joined(labels: Sequence[Mapping[str, Json]], arrays: Arrays) -> list[dict[str, Json]]:
    """Join each row's labels with its part of every column; the parts are views.

    A flat column comes with `NAME.offsets` [rows + 1]; any other column is [rows, width]. In an optional column, the
    part of a row without values is empty, and is omitted.
    """
    rows = [dict(each) for each in labels]
    for name, values in arrays.items():
        if name.endswith(".offsets"):
            continue
        offsets = arrays.get(f"{name}.offsets")
        parts = values if offsets is None else [values[start:end] for start, end in pairwise(offsets)]
        for row, part in zip(rows, parts, strict=True):
            if name not in _OPTIONAL or len(part):
                row[name] = part
    return rows


def content(source: Source) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source


def raw(source: Source) -> NDArray[np.uint8]:
    """The bytes as a writable array. A file is mapped copy-on-write, so only the pages in use are read."""
    if isinstance(source, Path):
        return np.memmap(source, np.uint8, mode="c") if source.stat().st_size else np.zeros(0, np.uint8)
    return np.frombuffer(source, np.uint8).copy()
