"""Images as text: data URLs and bare base64."""

from __future__ import annotations

import binascii
from base64 import b64encode
from urllib.parse import unquote

from proxy.types import ImageFile
from tokengrove.errors import InvalidRequest

_URL_SAFE = str.maketrans("-_", "+/", " \t\r\n")


Text = str | memoryview
"""A text, or its UTF-8 bytes in the body of a request."""


def is_url(text: Text) -> bool:
    """Whether the text is the URL of an image, which must be fetched."""
    return isinstance(text, str) and (text[:7].lower() == "http://" or text[:8].lower() == "https://")


def data_url(file: ImageFile) -> str:
    """Return an image as a data URL."""
    return f"data:{file.media_type};base64,{b64encode(file.data).decode()}"


def decode_text(text: Text, name: str, most_bytes: int) -> bytes:
    """Return the bytes of a data URL, with or without parameters, or of base64 text.

    White space, missing padding and the alphabet for URLs are tolerated. Raises InvalidRequest naming the field.
    """
    if isinstance(text, memoryview):
        text = str(text, "utf-8", "replace")
    data = text
    if text[:5].lower() == "data:":
        head, comma, data = text.partition(",")
        if not comma or not head.lower().rstrip().endswith(";base64"):
            raise InvalidRequest(
                f"'{name}' must be a data URL with base64, such as data:image/png;base64,...", param=name
            )
    if len(data) * 3 // 4 > most_bytes + 3:
        raise InvalidRequest(
            f"'{name}' is an image of about {len(data) * 3 // 4} bytes; at most {most_bytes} are allowed "
            "(--max-image-bytes)",
            param=name,
        )
    try:
        return binascii.a2b_base64(data, strict_mode=True)
    except ValueError:
        return _tolerantly(data, name)


def _tolerantly(data: str, name: str) -> bytes:
    plain = unquote(data).translate(_URL_SAFE).rstrip("=")
    try:
        return binascii.a2b_base64(plain + "=" * (-len(plain) % 4), strict_mode=True)
    except ValueError:  # also if it is not ASCII
        raise InvalidRequest(
            f"'{name}' is neither a data URL, nor base64 text, nor an http(s) URL", param=name
        ) from None
