"""Images for engine servers: data URLs that every server decodes to the same pixels as this proxy.

Servers decode images differently: they ignore the orientation, put transparent pixels on other colours, or decode a
JPEG on the GPU. A plain PNG is therefore sent unchanged, and any other image as a PNG of its pixels. Each image is
encoded once and kept in an LRU cache.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import orjson

from proxy.images.decode import decode_image
from proxy.images.plain import is_plain
from proxy.images.prompt_images import PromptImages
from proxy.prompt_ids import PromptIds
from proxy.types import Ids, ImageFile, PlacedImage, ids_of
from tokengrove.image_detail import shown, shown_size

_MOST_BYTES = 512 * 2**20

_Key = tuple[str, str]


class SentImages:
    """A cache of at most `most_bytes` of data URLs, as beginnings of JSON strings that `salted` completes.

    Use it on one event loop.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._held: OrderedDict[_Key, bytes] = OrderedDict()
        self._bytes = 0

    async def urls(self, images: PromptImages) -> list[bytes]:
        """Return a data URL for each image. Raises InvalidRequest for an image that is not found."""
        wanted = {_key(image): image for image in images.placed}
        found = {key: self._held[key] for key in wanted if key in self._held}
        for key in found:
            self._held.move_to_end(key)
        missing = [image for key, image in wanted.items() if key not in found]
        files = await images.read(missing) if missing else []
        for image, file in zip(missing, files, strict=True):
            url = await asyncio.to_thread(_data_url, file, image.detail)
            found[_key(image)] = url
            self._keep(_key(image), url)
        return [found[_key(image)] for image in images.placed]

    def _keep(self, key: _Key, url: bytes) -> None:
        if key not in self._held:
            self._held[key] = url
            self._bytes += len(url)
        while self._bytes > self._most_bytes:
            self._bytes -= len(self._held.popitem(last=False)[1])


@dataclass(frozen=True, slots=True)
class Eyes:
    """The shared data of the servers of a vision model. `placeholders`: the placeholder ids of images and videos."""

    images: SentImages
    placeholders: tuple[int, ...] = ()

    def never_sampled(self, bias: float) -> dict[str, float]:
        """The `logit_bias` that prevents placeholders from being sampled."""
        return {str(token): bias for token in self.placeholders}


class SentPrompt:
    """A prompt with images as a field of a request, with one placeholder for each image, which the server expands.

    `after`: the parts that follow the ids in the request's JSON.
    """

    __slots__ = ("_parts",)

    def __init__(self, ids: Ids, after: Sequence[bytes]) -> None:
        text = orjson.dumps(np.frombuffer(ids, np.int32), option=orjson.OPT_SERIALIZE_NUMPY)
        self._parts = [text, *after]

    def json(self) -> list[bytes]:
        """The ids as a JSON array, followed by `after`, in parts."""
        return self._parts


def collapsed(prompt: PromptIds, placed: Sequence[PlacedImage]) -> Ids:
    """Return the ids with one placeholder for each image."""
    ids, out, at = prompt.joined, ids_of(), 0
    for image in placed:
        out += ids[at : image.start + 1]
        at = image.start + image.length
    return out + ids[at:]


def salted(urls: Sequence[bytes], salt: str = "", *, before: bytes = b"", after: bytes = b"") -> list[bytes]:
    """Return the inside of a JSON array of data URLs in parts, without copying them, each between `before` and `after`.

    `salt`: written after the picture, where decoders ignore it. Servers that identify images by their bytes then see a
    different image.
    """
    parts: list[bytes] = []
    end = b'%b"' % b64encode(salt.encode()) + after
    for url in urls:
        parts += [b"," + before if parts else before, url, end]
    return parts


def _key(image: PlacedImage) -> _Key:
    return image.digest, image.detail


def _data_url(file: ImageFile, detail: str) -> bytes:
    """Return a PNG as a data URL to which more base64 can be appended, padded with zeros to a multiple of 3 bytes."""
    whole = shown_size(file.width, file.height, detail) == (file.width, file.height)
    data = file.data if whole and is_plain(file) else _png(file, detail)
    return b'"data:image/png;base64,' + b64encode(data + bytes(-len(data) % 3))


def _png(file: ImageFile, detail: str) -> bytes:
    out = BytesIO()
    shown(decode_image(file.data), detail).save(out, "PNG", compress_level=1)
    return out.getvalue()
