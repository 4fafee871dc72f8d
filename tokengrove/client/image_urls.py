"""Images in any form as URLs for requests. Encoded images are never re-encoded."""

from __future__ import annotations

import base64
import hashlib
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.client.libraries import library
from tokengrove.errors import InvalidRequest

Message = Mapping[str, Any]

_REMOTE = ("data:", "http://", "https://")
_BEGINNINGS = ((b"\x89PNG", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"RIFF", "webp"))
_OF_PNG = ("1", "L", "LA", "P", "RGB", "RGBA")
_FAST = 1
"""The compression level: a screenshot is sent once, over a short distance."""


class ImageUrls:
    """URLs of images, with a cache for PIL images and arrays: a loop sends the same image in every turn.

    `most`: the number of images to cache. The key is a hash of the pixels, so a modified image is encoded again.
    """

    def __init__(self, most: int = 512) -> None:
        self._known: dict[str, str] = {}
        self._most = most

    def url(self, image: Any) -> str:
        """`image_url`, cached. It is slow: call it in a thread."""
        if not hasattr(image, "tobytes"):
            return image_url(image)
        shape = (getattr(image, "mode", None), getattr(image, "size", None), getattr(image, "shape", None))
        key = hashlib.sha256(repr(shape).encode() + image.tobytes()).hexdigest()
        found = self._known.pop(key, None) or image_url(image)
        self._known[key] = found
        if len(self._known) > self._most:
            del self._known[next(iter(self._known))]
        return found

    def urls(self, images: Any) -> list[str]:
        """The URLs of one image, or of several."""
        many = images if isinstance(images, list | tuple) else [images]
        return [self.url(image) for image in many if image is not None]

    def messages(self, messages: Iterable[Message], images: Sequence[Any] = ()) -> list[dict[str, Any]]:
        """Copies of messages with their images, in any form of loops and datasets, as parts of a chat completion.

        A part of type `image` has its image as `image`, `bytes`, `url` or `path`. A part without an image takes the
        next of `images`. If every part has its own, `images` are ignored. Raises InvalidRequest if the numbers differ.
        """
        messages = list(messages)
        parts = images_of(messages)
        empty = sum(part is None for part in parts)
        if (empty or not parts) and empty != len(images):
            message = f"the messages have {empty} parts for {len(images)} images"
            raise InvalidRequest(message, param="images")
        waiting = iter(images if empty else ())
        return [{**message, **self._content(message, waiting)} for message in messages]

    def _content(self, message: Message, waiting: Iterator[Any]) -> dict[str, Any]:
        content = message.get("content")
        if not isinstance(content, list | tuple):
            return {}
        return {"content": [self._part(part, waiting) for part in content]}

    def _part(self, part: Any, waiting: Iterator[Any]) -> Any:
        if not isinstance(part, Mapping):
            return part
        if part.get("type") != "image":
            return {name: value for name, value in part.items() if value is not None}  # tables add null fields
        image = next((part[name] for name in _PICTURES if part.get(name) is not None), None)
        image = next(waiting) if image is None else image
        detail = {"detail": part["detail"]} if part.get("detail") else {}
        return {"type": "image_url", "image_url": {"url": self.url(image), **detail}}


_PICTURES = ("image", "bytes", "url", "path")


def images_of(messages: Iterable[Message]) -> list[Any]:
    """The images of messages, in order and unchanged; None for a part without an image of its own.

    Parts may be those of a chat completion (`image_url`), or of type `image`.
    """
    found = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image":
                found.append(next((part[name] for name in _PICTURES if part.get(name) is not None), None))
            elif kind == "image_url":
                given = part.get("image_url")
                found.append(given.get("url") if isinstance(given, Mapping) else given)
    return found


def image_url(image: Any) -> str:
    """An image as a URL. A URL is returned unchanged.

    A PIL image, or an array uint8 [height, width, 3 or 4], is encoded as PNG, which is lossless. Bytes, base64 of an
    image, and the file at a path (or `file://`) are used unchanged. A mapping has one of these as `bytes`, `image`,
    `url` or `path`. Raises InvalidRequest for anything else, and for a file that cannot be read.
    """
    if isinstance(image, Mapping):
        inner = next((image[name] for name in _PICTURES if image.get(name) is not None), None)
        return image_url(inner)
    if isinstance(image, str) and image.startswith(_REMOTE):
        return image
    if isinstance(image, str | os.PathLike):
        return _of_bytes(_base64(image) or _read(os.fspath(image)))
    if isinstance(image, bytes | bytearray | memoryview):
        return _of_bytes(bytes(image))
    if hasattr(image, "dtype") and hasattr(image, "shape"):
        image = _of_array(image)
    if hasattr(image, "save") and hasattr(image, "mode"):
        return _of_bytes(_png(image))
    raise InvalidRequest(
        "an image is a PIL image, bytes, an array [height, width, 3], a URL or the path of a file, not "
        f"{type(image).__name__!r}",
        param="images",
    )


def digest_of_url(url: str) -> str:
    """The server's digest of the image of a data URL; "" for any other URL, because its bytes are unknown."""
    if not url.startswith("data:"):
        return ""
    return hashlib.sha256(base64.b64decode(url.partition(",")[2])).hexdigest()


def is_image(data: bytes) -> bool:
    """Whether these bytes begin like a PNG, JPEG, GIF or WebP."""
    return data.startswith(tuple(begin for begin, _ in _BEGINNINGS))


def _of_bytes(data: bytes) -> str:
    kind = next((name for begin, name in _BEGINNINGS if data.startswith(begin)), "png")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def _base64(text: Any) -> bytes:
    """The decoded bytes of a base64 text if they are an image, else b""."""
    try:
        data = base64.b64decode(text, validate=True)
    except (TypeError, ValueError):
        return b""
    return data if is_image(data) else b""


def _of_array(values: Any) -> Any:
    if str(values.dtype) != "uint8" or len(values.shape) != 3 or values.shape[2] not in (3, 4):
        message = f"an array that is an image is uint8 [height, width, 3], not {values.dtype} {tuple(values.shape)}"
        raise InvalidRequest(message, param="images")
    return library("PIL.Image").fromarray(values)


def _png(picture: Any) -> bytes:
    plain = picture if picture.mode in _OF_PNG else picture.convert("RGB")
    written = io.BytesIO()
    plain.save(written, "PNG", compress_level=_FAST)
    return written.getvalue()


def _read(path: str) -> bytes:
    try:
        return Path(path.removeprefix("file://")).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no path"
        raise InvalidRequest(f"the file of an image cannot be read: {reason}", param="images") from None
