"""Columnar formats: npz, and safetensors, which is a header and raw bytes and needs no library.

In layout padded, if any row has `token_rewards`, rows without them have zeros. If any row has `unmasked_logprobs`, rows
without them have the logprobs.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED

import numpy as np
import orjson
from numpy.typing import NDArray

from tokengrove.client.images import table_of
from tokengrove.client.readers.page import Page, Source, joined, page_of, parsed, raw, without_images

# A safetensors file begins with the length of its header, in this many bytes.
_LENGTH_BYTES = 8
_DTYPES = {
    "I32": "<i4",
    "I64": "<i8",
    "F32": "<f4",
    "BOOL": "?",
    "U8": "u1",
    "U16": "<u2",
    "U32": "<u4",
    "F16": "<f2",
    "F64": "<f8",
}


def read_npz(source: Source) -> Page:
    with np.load(source if isinstance(source, Path) else io.BytesIO(source), allow_pickle=False) as archive:
        if packed := [member.filename for member in archive.zip.infolist() if member.compress_type != ZIP_STORED]:
            raise ValueError(f"{packed[0]} is compressed, and could be far larger than it seems")
        arrays = {name: archive[name] for name in archive.files}
    metadata = parsed(arrays.pop("metadata").tobytes())
    images = table_of(metadata.get("images", {}), without_images(arrays))
    return page_of({**metadata, "samples": joined(metadata["samples"], arrays)}, images)


def read_safetensors(source: Source) -> Page:
    data = raw(source)
    length = int.from_bytes(data[:_LENGTH_BYTES].tobytes(), "little")
    body = data[_LENGTH_BYTES + length :]
    header = parsed(data[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    metadata = {name: orjson.loads(text) for name, text in header.pop("__metadata__").items()}
    arrays = {name: _tensor(body, **told) for name, told in header.items()}
    images = table_of(metadata.get("images", {}), without_images(arrays))
    return page_of({**metadata, "samples": joined(metadata["samples"], arrays)}, images)


def _tensor(body: NDArray[np.uint8], dtype: str, shape: list[int], data_offsets: list[int]) -> NDArray[Any]:
    """A view of the bytes. Raises ValueError if some are missing."""
    return body[slice(*data_offsets)].view(_DTYPES[dtype]).reshape(shape)
