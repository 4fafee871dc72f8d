"""The images of an answer, each once, however many samples contain it. Their bytes are read one image at a time.

Encoders do not read the database: they yield a `WantedImage` between pieces of bytes, and are sent the `ImageEntry`.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple, cast

from numpy.typing import NDArray

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import SampleRow
from proxy.types import ImageFile
from tokengrove.options.export import Images

AUTO = "auto"
"""The name of a detail that no client set."""

Inputs = Mapping[str, NDArray[Any]]
"""The arrays that the model's processor made from one image, by the processor's names."""


class WantedImage(NamedTuple):
    """An image that an encoder needs. `details`: the details of this image in all samples."""

    digest: str
    details: tuple[str, ...]


class ImageEntry(NamedTuple):
    """An image. `inputs`: by detail, if the export includes `multi_modal_inputs`."""

    file: ImageFile
    inputs: Mapping[str, Inputs]


Pieces = Generator[bytes | WantedImage, ImageEntry | None, None]
"""Bytes to send, perhaps none, and wanted images, which must be sent to the generator before it continues."""


class ImageTable:
    """The images of the noted rows, in the order of their first occurrence."""

    def __init__(self, options: LayoutOptions) -> None:
        self.has_bytes = options.images is Images.BYTES
        self._asked = self.has_bytes or options.multi_modal_inputs is True
        self._details: dict[str, dict[str, None]] = {}

    def note(self, row: SampleRow) -> list[WantedImage]:
        """Note the images of a row, if the answer includes images. Return the images that no earlier row contains."""
        shown = row.images if self._asked else ()
        new = dict.fromkeys(image.digest for image in shown if image.digest not in self._details)
        for image in shown:
            self._details.setdefault(image.digest, {})[image.detail] = None
        return [WantedImage(digest, ()) for digest in new]

    def wanted(self) -> list[WantedImage]:
        """All noted images."""
        return [WantedImage(digest, tuple(details)) for digest, details in self._details.items()]

    def told(self, entry: ImageEntry) -> dict[str, Any]:
        """An image as JSON: `media_type`, `width`, `height`; `data` in base64 if the answer includes bytes; `inputs` if
        it includes them: by detail and name, `data` in base64 (little-endian), `shape` and `dtype`."""
        out = described(entry.file)
        if self.has_bytes:
            out["data"] = b64encode(entry.file.data).decode("ascii")
        if entry.inputs:
            each = entry.inputs.items()
            out["inputs"] = {detail or AUTO: {name: tensor(a) for name, a in found.items()} for detail, found in each}
        return out


def described(file: ImageFile) -> dict[str, Any]:
    """The fields of an image without its bytes."""
    return {"media_type": file.media_type, "width": file.width, "height": file.height}


def given(answer: ImageEntry | None) -> ImageEntry:
    """The entry that an encoder was sent for the image that it wanted."""
    return cast(ImageEntry, answer)


def arrays(entry: ImageEntry) -> dict[str, NDArray[Any]]:
    """The arrays of an image by their names in array formats: `NAME/DIGEST`, or `NAME/DIGEST.DETAIL`."""
    ending = {detail: f"{entry.file.digest}.{detail}" if detail else entry.file.digest for detail in entry.inputs}
    return {f"{name}/{ending[at]}": value for at, found in entry.inputs.items() for name, value in found.items()}


def tensor(values: NDArray[Any]) -> dict[str, Any]:
    """An array as JSON: its bytes in base64 (little-endian), shape and dtype in NumPy's notation."""
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    data = b64encode(little.tobytes()).decode("ascii")
    return {"data": data, "shape": list(values.shape), "dtype": values.dtype.name}
