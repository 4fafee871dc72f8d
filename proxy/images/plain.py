"""Images that all decoders decode to the same pixels, whatever rule they follow."""

from __future__ import annotations

from io import BytesIO
from itertools import dropwhile

from proxy.images.parts import png_parts
from proxy.types import ImageFile

_PNG = "image/png"
_ORIENTATION = 0x0112
_TEXTS = (b"eXIf", b"tEXt", b"zTXt", b"iTXt")  # these may contain an orientation
_MODES = ("RGB", "L", "P", "1")


def is_plain(file: ImageFile) -> bool:
    """Return whether the image is a PNG of 8 bits, without transparency, orientation or further pictures.

    A JPEG is not plain: decoders differ by a level or two, decoders on a GPU by more. Pixels are decoded only to find
    an orientation that follows them.
    """
    if file.media_type != _PNG:
        return False
    from PIL import Image

    from_pixels = dropwhile(lambda part: part != b"IDAT", png_parts(file.data))
    behind = any(part in _TEXTS for part in from_pixels)
    with Image.open(BytesIO(file.data), formats=["PNG"]) as image:
        exif = image.getexif() if behind else Image.Image.getexif(image)  # PNG's own `getexif` decodes all pixels
        turned = exif.get(_ORIENTATION, 1) != 1
        animated = getattr(image, "is_animated", False)
        return image.mode in _MODES and not image.has_transparency_data and not turned and not animated
