"""The content of a message from its parts: the joined text, and the images with their places in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proxy.types import ImagePart

Images = tuple[ImagePart, ...]


def joined(parts: Sequence[str | ImagePart]) -> tuple[str, Images]:
    """Return the text of all parts, and the images, each with the number of characters before it."""
    texts: list[str] = []
    images: list[ImagePart] = []
    at = 0
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            at += len(part)
        else:
            images.append(part._replace(at=at))
    return "".join(texts), tuple(images)


def split(content: str, images: Images) -> list[str | ImagePart]:
    """Split a content into its parts: the inverse of `joined`, without empty texts."""
    parts: list[str | ImagePart] = []
    start = 0
    for image in images:
        if image.at > start:
            parts.append(content[start : image.at])
            start = image.at
        parts.append(image)
    return [*parts, content[start:]] if content[start:] else parts


def image_of(part: Any) -> ImagePart | None:
    """Return the image of a decoded part whose source was read; None for any other part."""
    for key in ("image_url", "source", "inlineData", "fileData"):
        image = part.get(key)
        if type(image) is ImagePart:
            return image
    return None
