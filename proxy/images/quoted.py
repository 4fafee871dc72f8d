"""Images in messages of engines: an error that quotes its request is passed on without the bytes of images."""

from __future__ import annotations

import re

_DATA = re.compile(r"data:[\w.+/-]*;base64,[A-Za-z0-9+/=]*")


def without_images(text: str) -> str:
    """Return a message without its data URLs."""
    return _DATA.sub("(an image)", text)
