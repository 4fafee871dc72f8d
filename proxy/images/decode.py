"""Reads images with Pillow: the single rule by which bytes become pixels, for sizes, engines, exports and tensors.

PNG, JPEG, WebP and GIF only, according to the bytes; the first frame; the EXIF orientation applied; 8 bits of red,
green and blue; transparency on white. The size is checked before anything is decoded. Equal bytes give equal pixels.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128

from proxy.images.parts import MOST_PARTS, has_too_many_parts
from proxy.types import ImageFile
from tokengrove.errors import InvalidRequest, how_to_get

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 36_000_000
"""The pixels of an 8K screen, rounded up. Width times height, according to the header."""
MOST_SIDE = 32_768
MOST_RATIO = 200
"""The ratio of the longer side to the shorter. Models' processors refuse more, such as those of Qwen-VL and GLM-V.

Pillow keeps a pointer for each row, and creates all of them without releasing the GIL. An image one pixel wide would
need ten times the memory of its pixels, and block the event loop.
"""
MOST_BYTES = 20 * 2**20
_MEDIA_TYPES = {
    **{"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"},
    "MPO": "image/jpeg",  # a JPEG followed by further pictures, as phones write them
}
_SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8")
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_ORIENTATION = 0x0112
# A progressive JPEG has about ten. Each scan processes all pixels but may take only about fifty bytes: without a limit,
# a file of 20 MB occupies a thread for hours.
_MOST_SCANS = 100
_SCAN, _END = 0xDA, 0xD9
_BARE = (0x01, 0xD8)  # JPEG markers without a length
_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")
_WHITE = (255, 255, 255, 255)
_STRIP_PIXELS = 2**18  # blended in a millisecond
# By orientation, from 2 on.
_TURNS = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"),
    *("ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)


def digest_of(data: bytes) -> str:
    """Return the digest of an image: SHA-256 of its original bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def read_image(
    data: bytes, name: str = "image", *, most_pixels: int = MOST_PIXELS, most_bytes: int = MOST_BYTES
) -> ImageFile:
    """Read an image from its bytes. All of it is decoded once, so `pixels` is set.

    `name`: the field of the request that contains it. Raises InvalidRequest naming it for an image that is broken,
    unsupported or too large.
    """
    _check_bytes(data, name, most_bytes)
    if has_too_many_parts(data):
        raise InvalidRequest(f"'{name}' is an image of more than {MOST_PARTS} parts; encode it anew", param=name)
    with _reading(data, name), _opened(data) as image:
        _check_pixels(image.size, name, most_pixels)
        _check_shape(image.size, name)
        _check_scans(data, name)
        kind, rgb = _MEDIA_TYPES[str(image.format)], _to_rgb(image)
    return ImageFile(digest_of(data), kind, rgb.width, rgb.height, data, pixels_of(rgb))


def decode_image(data: bytes, name: str = "image") -> Image.Image:
    """Return an image as the model sees it, in mode RGB. CPU-heavy. Raises InvalidRequest for a broken image.

    For images that `read_image` has accepted: their size is not checked again.
    """
    with _reading(data, name), _opened(data) as image:
        return _to_rgb(image)


def pixels_of(image: Image.Image) -> str:
    """Return a digest of the size and the pixels of an RGB image, in hex."""
    found = xxh3_128(b"%d %d " % image.size)
    found.update(image.tobytes())
    return found.hexdigest()


@cache
def _image_module() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidRequest(f"this server cannot read images; {how_to_get('tokengrove[images]')}") from error
    # Python keeps each warning's text, and one EXIF block makes Pillow warn 60,000 times. The size of images is checked
    # here, against the server's own limit, which is below Pillow's.
    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _opened(data: bytes) -> Image.Image:
    image: Image.Image = _image_module().open(BytesIO(data), formats=_FORMATS)
    return image


@contextmanager
def _reading(data: bytes, name: str) -> Iterator[None]:
    """Name the field in every failure of Pillow. Its parsers raise arbitrary exceptions, so all are caught."""
    pillow = _image_module()
    try:
        yield
    except (InvalidRequest, MemoryError):
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning):
        message = f"'{name}' has far more pixels than are allowed (--max-image-pixels); scale the image down"
        raise InvalidRequest(message, param=name) from None
    except Exception:
        known = data.startswith(_SIGNATURES) or (data[:4] == b"RIFF" and data[8:12] == b"WEBP")
        message = "is a broken image: it cannot be decoded" if known else "is no PNG, JPEG, WebP or GIF image"
        raise InvalidRequest(f"'{name}' {message}", param=name) from None


def _check_bytes(data: bytes, name: str, most: int) -> None:
    if not data:
        raise InvalidRequest(f"'{name}' is an empty image", param=name)
    if len(data) > most:
        message = f"'{name}' is an image of {len(data)} bytes; at most {most} are allowed (--max-image-bytes)"
        raise InvalidRequest(message, param=name)


def _check_pixels(size: tuple[int, int], name: str, most: int) -> None:
    width, height = size
    if width * height > most:
        raise InvalidRequest(
            f"'{name}' is an image of {width} x {height} pixels; at most {most} pixels are allowed "
            "(--max-image-pixels); scale it down",
            param=name,
        )


def _check_shape(size: tuple[int, int], name: str) -> None:
    longer, shorter = max(size), min(size)
    if longer > MOST_SIDE:
        limit = f"a side may have at most {MOST_SIDE}"
    elif longer > MOST_RATIO * shorter:
        limit = f"the longer side may have at most {MOST_RATIO} times the pixels of the shorter one"
    else:
        return
    message = f"'{name}' is an image of {size[0]} x {size[1]} pixels; {limit}; cut or scale it"
    raise InvalidRequest(message, param=name)


def _check_scans(data: bytes, name: str) -> None:
    """Refuse a JPEG whose scans would take far longer to decode than its pixels."""
    if not data.startswith(b"\xff\xd8") or data.count(bytes((0xFF, _SCAN))) <= _MOST_SCANS:
        return
    scans, at = 0, 2
    while (found := _MARKER.search(data, at)) and data[found.start() + 1] != _END:
        kind, at = data[found.start() + 1], found.end()
        if kind not in _BARE:
            at += int.from_bytes(data[at : at + 2], "big")
        scans += kind == _SCAN
        if scans > _MOST_SCANS:
            message = f"'{name}' is a JPEG of more than {_MOST_SCANS} scans; encode it anew"
            raise InvalidRequest(message, param=name)


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8. A broken EXIF block counts as none: no viewer refuses an image for it."""
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # the parser raises arbitrary exceptions
        return 1
    return value if value in range(1, 9) else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    pillow = _image_module()
    turn = _orientation(image)
    if image.mode.startswith("I"):  # 16 bits of grey, of which Pillow would clip values above 255
        image = image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    rgb = _on_white(image) if image.has_transparency_data else image.convert("RGB")
    return rgb if turn == 1 else rgb.transpose(pillow.Transpose[_TURNS[turn - 2]])


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image on white, in mode RGB. Pillow holds the GIL while it blends, so this is done in strips, between
    which other threads run."""
    pillow = _image_module()
    image.load()
    rgb: Image.Image = pillow.new("RGB", image.size)
    rows = max(1, _STRIP_PIXELS // image.width)
    for top in range(0, image.height, rows):
        seen = image.crop((0, top, image.width, min(top + rows, image.height))).convert("RGBA")
        white = pillow.new("RGBA", seen.size, _WHITE)
        rgb.paste(pillow.alpha_composite(white, seen).convert("RGB"), (0, top))
    return rgb
