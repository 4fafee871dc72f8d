"""Images that everybody decodes to the same pixels, whatever rule they follow."""

from __future__ import annotations

from io import BytesIO
from itertools import dropwhile

from proxy.images.parts import png_parts
from proxy.types import ImageFile

_PNG = "image/png"
_ORIENTATION = 0x0112
_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # where an orientation may stand
_MODES = ("RGB", "L", "P", "1")


def is_plain(file: ImageFile) -> bool:
    """Return whether the image is a PNG of 8 bits, without transparency, an orientation or further pictures.

    A JPEG is not: decoders differ by a level or two, those on a GPU more. Decodes pixels only to see an
    orientation that stands behind them.
    """
    if file.media_type != _PNG:
        return False
    from PIL import Image

    from_pixels = dropwhile(lambda part: part != b"IDAT", png_parts(file.data))
    behind = any(part in _TEXTS for part in from_pixels)
    with Image.open(BytesIO(file.data), formats=["PNG"]) as image:
        exif = image.getexif() if behind else Image.Image.getexif(image)  # a PNG's own decodes all of it
        turned = exif.get(_ORIENTATION, 1) != 1
        animated = getattr(image, "is_animated", False)
        return image.mode in _MODES and not image.has_transparency_data and not turned and not animated
