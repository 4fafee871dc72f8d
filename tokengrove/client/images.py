"""The images of an export: their bytes, and the output of the model's processor. Each is stored once.

Samples of one export share one table, so the arrays of an image in a hundred samples are in memory once.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tokengrove.client.libraries import library
from tokengrove.client.tensors import Array
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    from PIL.Image import Image

AUTO = "auto"
"""The detail of an image without a detail from the client, in the tables of exports."""

ImageTable = dict[str, "ImageBytes"]
"""Images by digest."""


@dataclass(frozen=True, slots=True, eq=False)
class ImageBytes:
    """An image as it was sent. `width`, `height`: pixels, as the model saw it. `digest`: SHA-256 of `data`, in hex.

    `inputs`: by detail, the output of the model's processor. `data` is empty if the export has only these.
    """

    digest: str
    media_type: str
    width: int
    height: int
    data: bytes = field(default=b"", repr=False)
    inputs: Mapping[str, Mapping[str, Array]] = field(default_factory=dict, repr=False)

    def pillow(self) -> Image:
        """Decode the image as the model saw it: first frame, rotated by its EXIF data, RGB, transparent parts on white.

        Raises InvalidRequest without Pillow.
        """
        library("PIL")
        from PIL import Image, ImageOps

        with Image.open(io.BytesIO(self.data)) as opened:
            return _opaque(ImageOps.exif_transpose(opened))


def _opaque(picture: Image) -> Image:
    from PIL import Image

    if picture.mode.startswith("I"):  # 16 bits of grey
        picture = picture.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if not picture.has_transparency_data:
        return picture.convert("RGB")
    layered = picture.convert("RGBA")
    white = Image.new("RGBA", layered.size, "white")
    return Image.alpha_composite(white, layered).convert("RGB")


def concatenated(images: Sequence[Mapping[str, Any]], table: Mapping[str, ImageBytes]) -> dict[str, Array]:
    """The concatenated arrays of these images of a sample.

    Raises LookupError for an image that the table lacks, and InvalidRequest for arrays whose shapes do not match.
    """
    found = [table[image["digest"]].inputs[image.get("detail") or AUTO] for image in images]
    names = dict.fromkeys(name for each in found for name in each)
    return {name: _joined(name, [each[name] for each in found if name in each]) for name in names}


def _joined(name: str, values: Sequence[Array]) -> Array:
    try:
        return np.concatenate(values)
    except ValueError:
        raise InvalidRequest(
            f"the arrays {name!r} of these images do not fit below each other: this model's processor pads them to one "
            "size; read those of each image in Export.images[digest].inputs",
            param="multi_modal_inputs",
        ) from None


def table_of(told: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, Array] | None = None) -> ImageTable:
    """The image table of an answer. `told`: its field `images`.

    `arrays`: its arrays with names `NAME/DIGEST` or `NAME/DIGEST.DETAIL`. Raises ValueError for an array of an image
    that `told` lacks.
    """
    data: dict[str, bytes] = {}
    inputs: dict[str, dict[str, dict[str, Array]]] = {digest: {} for digest in told}
    for full, values in (arrays or {}).items():
        name, ending = full.split("/")
        digest, _, detail = ending.partition(".")
        if digest not in told:
            raise ValueError(f"the image {digest} is not described")
        if name == "images":
            data[digest] = values.tobytes()
        else:
            inputs[digest].setdefault(detail or AUTO, {})[name] = values
    return {digest: _image(digest, each, data.get(digest), inputs[digest]) for digest, each in told.items()}


def _image(digest: str, told: Mapping[str, Any], data: bytes | None, inputs: Mapping[str, Any]) -> ImageBytes:
    if data is None:
        data = base64.b64decode(told.get("data", ""), validate=True)
    found = {
        detail: {name: _array(**each) for name, each in arrays.items()}
        for detail, arrays in told.get("inputs", {}).items()
    }
    sizes = (told["media_type"], told["width"], told["height"])
    return ImageBytes(digest, *sizes, data, {**found, **inputs})


def _array(data: str | bytes, shape: Sequence[int], dtype: str) -> Array:
    raw = base64.b64decode(data, validate=True) if isinstance(data, str) else data
    kind = np.dtype(dtype)
    return np.frombuffer(raw, kind.newbyteorder("<")).reshape(shape).astype(kind)


def image_of_row(row: Mapping[str, Any]) -> ImageBytes:
    """The image in a row of an Arrow stream, or in an element of a Parquet column."""
    inputs: dict[str, dict[str, Array]] = {}
    for each in row["inputs"] or ():
        inputs.setdefault(each["detail"], {})[each["name"]] = _array(each["data"], each["shape"], each["dtype"])
    sizes = (row["media_type"], row["width"], row["height"])
    return ImageBytes(row["digest"], *sizes, row["data"] or b"", inputs)
