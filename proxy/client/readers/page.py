"""What any format holds: samples, what is said of each session, and the last fields of the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from proxy.client.values import Export, Json, Sample, sample_of

Source = bytes | Path
"""An answer, or the file that has one."""
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Page:
    """One answer. `end` has `cursor`, where the next page begins, and what a claim says of itself."""

    samples: list[Sample]
    sessions: dict[str, dict[str, Json]]
    end: Mapping[str, Json]

    @property
    def export(self) -> Export:
        return Export(self.samples, self.sessions)


def page_of(answer: Mapping[str, Json]) -> Page:
    """`{"samples", "sessions"}`, whose samples have labels and arrays, and the last fields."""
    end = {name: value for name, value in answer.items() if name not in ("samples", "sessions")}
    return Page([sample_of(entry) for entry in answer["samples"]], dict(answer["sessions"]), end)


def parsed(text: bytes) -> dict[str, Json]:
    """A JSON object. Raises ValueError for anything else."""
    value = orjson.loads(text)
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    return value


def joined(labels: Sequence[Mapping[str, Json]], arrays: Arrays) -> list[dict[str, Json]]:
    """Each row's labels with its part of every column; the parts are views.

    A flat column has `NAME.offsets` [rows + 1] beside it, any other is [rows, width]. Rewards of single tokens are
    of a row that has any.
    """
    rows = [dict(each) for each in labels]
    for name, values in arrays.items():
        if name.endswith(".offsets"):
            continue
        offsets = arrays.get(f"{name}.offsets")
        parts = values if offsets is None else [values[start:end] for start, end in pairwise(offsets)]
        for row, part in zip(rows, parts, strict=True):
            if name != "token_rewards" or len(part):
                row[name] = part
    return rows


def content(source: Source) -> bytes:
    return source.read_bytes() if isinstance(source, Path) else source


def raw(source: Source) -> NDArray[np.uint8]:
    """The bytes of an answer, which may be written to; of a file, only those that are looked at are read."""
    if isinstance(source, Path):
        return np.memmap(source, np.uint8, mode="c") if source.stat().st_size else np.zeros(0, np.uint8)
    return np.frombuffer(source, np.uint8).copy()
