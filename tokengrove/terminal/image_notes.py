"""Notes for images on a terminal: `[image 1280x800 3f2a91c0 512 tokens]` at their places in a message's text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_DIGEST_SHOWN = 8


def image_note(image: Mapping[str, Any]) -> str:
    """The known facts about an image in the form of `ImagePart.to_json`; unknown ones are omitted."""
    size = f"{image['width']}x{image['height']}" if image.get("width") and image.get("height") else ""
    kind = str(image.get("media_type", "")).removeprefix("image/")
    tokens = f"{image['tokens']} tokens" if image.get("tokens") else ""
    parts = ("image", size, kind, image["digest"][:_DIGEST_SHOWN], image.get("detail", ""), tokens)
    return f"[{' '.join(part for part in parts if part)}]"


def content_parts(message: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """The text of a message in parts, in order, with the notes of its images between them. True marks a note."""
    content, done = message["content"] or "", 0
    for image in message.get("images") or ():
        at = max(done, min(image.get("at", 0), len(content)))
        if at > done:
            yield content[done:at], False
        yield image_note(image), True
        done = at
    if content[done:]:
        yield content[done:], False


def content_with_images(message: Mapping[str, Any]) -> str:
    """The text of a message with the notes of its images."""
    return "".join(text for text, _ in content_parts(message))
