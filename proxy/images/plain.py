"""Images that everybody decodes to the same pixels, whatever rule they follow."""

from __future__ import annotations

from io import BytesIO

from proxy.types import ImageFile

_PNG = "image/png"
_ORIENTATION = 0x0112
_MODES = ("RGB", "L", "P", "1")


def is_plain(file: ImageFile) -> bool:
    """Return whether the image is a PNG of 8 bits, without transparency, an orientation or further pictures.

    A JPEG is not: decoders differ by a level or two, those on a GPU more. Reads the head of the file only.
    """
    if file.media_type != _PNG:
        return False
    from PIL import Image

    with Image.open(BytesIO(file.data), formats=["PNG"]) as image:
        turned = image.getexif().get(_ORIENTATION, 1) != 1
        animated = getattr(image, "is_animated", False)
        return image.mode in _MODES and not image.has_transparency_data and not turned and not animated
