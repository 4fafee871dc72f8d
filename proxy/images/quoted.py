"""Images in messages of engines: an error that quotes what it was sent goes on without the bytes."""

from __future__ import annotations

import re

_DATA = re.compile(r"data:[\w.+/-]*;base64,[A-Za-z0-9+/=]*")


def without_images(text: str) -> str:
    """Return a message without the data URLs in it."""
    return _DATA.sub("(an image)", text)
