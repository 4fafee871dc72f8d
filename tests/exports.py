"""Exports read back by numpy, safetensors and pyarrow, as the samples and session entries of the JSON format."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

JSON_LABELS = ("sampling", "turns")


OPTIONAL = ("token_rewards", "unmasked_logprobs")
"""The columns that a row may lack."""


def entries(answer: Mapping[str, Any]) -> dict[str, Any]:
    """The session entries of an answer by id, in their order."""
    return {entry["session_id"]: entry for entry in answer["sessions"]}


def read(name: str, body: bytes) -> dict[str, Any]:
    """Return `{"samples", "sessions", "cursor"}` of an answer in any format except areal; arrays become lists."""
    readers = {"json": json.loads, "jsonl": _jsonl, "npz": _npz, "safetensors": _safetensors}
    readers |= {"arrow": _arrow, "parquet": _parquet}
    found: dict[str, Any] = readers[name](body)
    return {**found, "samples": [as_float32(sample) for sample in found["samples"]]}


def as_float32(sample: dict[str, Any]) -> dict[str, Any]:
    """Round the floats in a sample's arrays to float32, as JSON writes the fewest digits that identify a float32."""
    return {
        name: np.array(value, np.float32).tolist() if isinstance(value, list) and _floats(value) else value
        for name, value in sample.items()
    }


def _floats(values: list[Any]) -> bool:
    return any(isinstance(value, float) for value in values)


def _jsonl(body: bytes) -> dict[str, Any]:
    *samples, last = map(json.loads, body.splitlines())
    return {"samples": samples, **last}


def _npz(body: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(body), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    metadata = json.loads(arrays.pop("metadata").tobytes())
    return {**metadata, "samples": _joined(metadata["samples"], arrays)}


def _safetensors(body: bytes) -> dict[str, Any]:
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = numpy.load(body)
    header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
    metadata = {name: json.loads(text) for name, text in header["__metadata__"].items()}
    return {**metadata, "samples": _joined(metadata["samples"], arrays)}


def _joined(labels: list[Any], arrays: dict[str, Any]) -> list[Any]:
    """Split flat arrays into rows by their offsets; arrays of fixed width are rows already."""
    rows = [dict(each) for each in labels]
    for name, values in arrays.items():
        if name.endswith(".offsets"):
            continue
        offsets = arrays.get(f"{name}.offsets")
        for at, row in enumerate(rows):
            part = values[at] if offsets is None else values[offsets[at] : offsets[at + 1]]
            if not (name in OPTIONAL and len(part) == 0):
                row[name] = part.tolist()
    return rows


def _arrow(body: bytes) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    samples, said = [], {"sessions": [], "cursor": None}
    with pa.ipc.open_stream(io.BytesIO(body)) as reader:
        while True:
            try:
                batch, metadata = reader.read_next_batch_with_custom_metadata()
            except StopIteration:
                return {"samples": samples, **said}
            samples += map(_plain, batch.to_pylist())
            for name, text in dict(metadata or {}).items():
                value = json.loads(text)
                if name == b"sessions":
                    said["sessions"] += value
                else:
                    said[name.decode()] = value


def _parquet(body: bytes) -> dict[str, Any]:
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    with parquet.ParquetFile(io.BytesIO(body)) as file:
        said = {name: json.loads(file.metadata.metadata[name.encode()]) for name in ("sessions", "cursor")}
        return {"samples": list(map(_plain, file.read().to_pylist())), **said}


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    parsed, rare = {name: json.loads(row[name]) for name in JSON_LABELS}, (*OPTIONAL, "images")
    kept = {name: value for name, value in row.items() if name not in rare or value is not None}
    return {**kept, **parsed}


def areal_tensor(serialised: dict[str, Any]) -> Any:
    """Decode a tensor as AReaL's deserialiser does: base64 of little-endian bytes, a shape, and torch's dtype."""
    assert serialised["type"] == "tensor"
    dtype = np.dtype(serialised["dtype"].removeprefix("torch.")).newbyteorder("<")
    return np.frombuffer(base64.b64decode(serialised["data"]), dtype).reshape(serialised["shape"])
