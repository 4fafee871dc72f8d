"""Which bytes are images, and which pixels they are."""

from __future__ import annotations

import struct
import warnings
import zlib
from io import BytesIO
from typing import Any

import pytest

from proxy.images import decode
from proxy.images.decode import MOST_RATIO, MOST_SIDE, decode_image, digest_of, pixels_of, read_image
from proxy.images.parts import MOST_PARTS
from proxy.images.plain import is_plain
from tokengrove.errors import InvalidRequest

Image = pytest.importorskip("PIL.Image")
RED, BLUE = (255, 0, 0), (0, 0, 255)


def encoded(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def halves(width: int = 4, height: int = 2) -> Any:
    """Red on the left, blue on the right."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def noise() -> Any:
    return Image.effect_noise((100, 100), 50)


def png_header(width: int, height: int) -> bytes:
    """A PNG that says this size, and has no pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(header) + png_chunk(b"IDAT" + zlib.compress(b"\0"))


def png_chunk(data: bytes) -> bytes:
    return struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))


@pytest.mark.parametrize("kind", ["PNG", "GIF", "WEBP", "JPEG"])
def test_the_bytes_say_the_type_and_the_size(kind: str) -> None:
    data = encoded(halves(8, 6), kind)
    file = read_image(data)
    assert (file.media_type, file.width, file.height) == (f"image/{kind.lower()}", 8, 6)
    assert (file.digest, file.data) == (digest_of(data), data)


def test_the_same_pixels_encoded_anew_have_the_same_digest_of_pixels_and_another_of_bytes() -> None:
    one, two = read_image(encoded(halves())), read_image(encoded(halves(), "WEBP", lossless=True))
    assert one.digest != two.digest
    assert one.pixels == two.pixels == pixels_of(halves())
    assert read_image(encoded(halves(2, 4))).pixels != one.pixels


def test_pixels_in_another_shape_have_another_digest() -> None:
    tall, wide = Image.new("RGB", (2, 4), RED), Image.new("RGB", (4, 2), RED)
    assert tall.tobytes() == wide.tobytes()
    assert pixels_of(tall) != pixels_of(wide)


def test_of_an_animation_the_first_frame_is_read() -> None:
    for kind in ("GIF", "PNG", "WEBP"):
        more = {"save_all": True, "append_images": [Image.new("RGB", (4, 2), BLUE)]}
        image = decode_image(encoded(Image.new("RGB", (4, 2), RED), kind, **more))
        assert (image.mode, image.size, image.getpixel((3, 1))) == ("RGB", (4, 2), pytest.approx(RED, abs=2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_exif_orientation_is_applied(orientation: int) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(halves(), "PNG", exif=exif)
    file, image = read_image(data), decode_image(data)
    wanted = ImageOps.exif_transpose(Image.open(BytesIO(data))).convert("RGB")
    assert (file.width, file.height) == image.size == wanted.size == ((2, 4) if orientation >= 5 else (4, 2))
    assert image.tobytes() == wanted.tobytes()


def test_a_broken_exif_block_turns_nothing() -> None:
    data = encoded(halves(), "JPEG", exif=b"Exif\0\0MM\0\x2a\xff\xff")
    assert decode_image(data).size == (4, 2)


def test_what_is_transparent_lies_on_white() -> None:
    clear, half = Image.new("RGBA", (2, 2), (*RED, 0)), Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert decode_image(encoded(clear)).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(half)).getpixel((0, 0)) == (127, 127, 127)
    keyed = encoded(halves(), transparency=RED)
    assert [decode_image(keyed).getpixel((x, 0)) for x in (0, 3)] == [(255, 255, 255), BLUE]
    palette = encoded(halves().quantize(2), transparency=0)
    assert (255, 255, 255) in [decode_image(palette).getpixel((x, 0)) for x in (0, 3)]


def test_a_large_transparent_image_is_blended_in_strips_of_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    clear = noise().convert("RGBA")
    clear.putalpha(noise())
    keyed = Image.effect_noise((100, 90), 50).quantize(8)
    at_once = [read_image(data).pixels for data in (encoded(clear), encoded(keyed, transparency=3))]
    blended, blend = [], Image.alpha_composite

    def noting(white: Any, seen: Any) -> Any:
        blended.append(seen.size)
        return blend(white, seen)

    monkeypatch.setattr(Image, "alpha_composite", noting)
    monkeypatch.setattr(decode, "_STRIP_PIXELS", 3000)
    assert [read_image(encoded(clear)).pixels] == at_once[:1]
    assert blended == [(100, 30)] * 3 + [(100, 10)]
    assert read_image(encoded(keyed, transparency=3)).pixels == at_once[1]


def test_all_depths_and_colour_models_become_eight_bits_of_rgb() -> None:
    assert decode_image(encoded(Image.new("I;16", (2, 2), 0x8011))).getpixel((0, 0)) == (128, 128, 128)
    assert decode_image(encoded(Image.new("1", (2, 2), 1))).getpixel((0, 0)) == (255, 255, 255)
    assert decode_image(encoded(Image.new("CMYK", (2, 2), (255, 0, 0, 0)), "JPEG")).getpixel((0, 0)) == (0, 255, 255)
    assert decode_image(encoded(Image.new("L", (1, 1), 7))).size == (1, 1)


@pytest.mark.parametrize("size", [(30_000, 30_000), (200_000, 200_000), (5001, 5000)])
def test_the_size_is_checked_before_anything_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidRequest, match="pixels") as caught:
        read_image(png_header(*size), "a.b", most_pixels=25_000_000)
    assert caught.value.param == "a.b"


@pytest.mark.parametrize(
    ("size", "limit"),
    [
        ((1, 36_000_000), f"a side may have at most {MOST_SIDE}"),
        ((MOST_SIDE + 1, 1000), f"a side may have at most {MOST_SIDE}"),
        ((2, 401), f"at most {MOST_RATIO} times the pixels of the shorter one"),
        ((20_100, 100), f"at most {MOST_RATIO} times the pixels of the shorter one"),
    ],
)
def test_a_long_or_narrow_image_is_refused_from_its_header(
    size: tuple[int, int], limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "_to_rgb", None)  # nothing is decoded
    with pytest.raises(InvalidRequest, match=f"'a' is an image of {size[0]} x {size[1]} pixels; .*{limit}") as caught:
        read_image(png_header(*size), "a")
    assert caught.value.param == "a"


@pytest.mark.parametrize("size", [(2, 400), (400, 2), (MOST_SIDE, 200)])
def test_an_image_may_be_as_long_and_narrow_as_the_limits_say(size: tuple[int, int]) -> None:
    file = read_image(encoded(Image.new("L", size)))
    assert (file.width, file.height) == size


def test_a_file_with_too_many_bytes_is_refused() -> None:
    data = encoded(halves())
    with pytest.raises(InvalidRequest, match=f"{len(data)} bytes; at most 10 are allowed"):
        read_image(data, most_bytes=10)


BROKEN = {
    "an empty file": b"",
    "a header alone": png_header(4, 4),
    "a truncated PNG": encoded(noise())[:-2000],
    "a truncated JPEG": encoded(noise(), "JPEG")[:-500],
    "a truncated WebP": encoded(noise(), "WEBP", lossless=True)[:-500],
    "a truncated GIF": encoded(noise(), "GIF")[:-2000],
    "a PNG of zeros": b"\x89PNG\r\n\x1a\n" + b"\0" * 100,
    "a JPEG of zeros": b"\xff\xd8\xff" + b"\0" * 100,
    "SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>',
    "HTML": b"<!doctype html><title>404</title>",
    "BMP": encoded(halves(), "BMP"),
    "TIFF": encoded(halves(), "TIFF"),
    "a program": b"\x7fELF" + b"\0" * 200,
}


@pytest.mark.parametrize("what", BROKEN)
def test_what_is_no_image_is_refused_by_the_name_of_its_field(what: str) -> None:
    with pytest.raises(InvalidRequest, match=r"'messages\[0\]' is (a broken|an empty|no PNG)") as caught:
        read_image(BROKEN[what], "messages[0]")
    assert caught.value.param == "messages[0]"


def test_a_text_chunk_that_unpacks_to_gigabytes_is_not_unpacked() -> None:
    data, text = encoded(halves()), b"zTXtComment\0\0" + zlib.compress(bytes(2**25))
    with pytest.raises(InvalidRequest, match="broken"):
        read_image(data[:33] + png_chunk(text) + data[33:])


def scans_of(data: bytes) -> tuple[bytes, bytes]:
    """A JPEG up to its last scan, and that scan."""
    at = data.rindex(b"\xff\xda")
    return data[:at], data[at:-2]


def test_a_jpeg_of_very_many_scans_is_refused_before_it_is_decoded() -> None:
    head, scan = scans_of(encoded(halves(64, 64), "JPEG", progressive=True))
    with pytest.raises(InvalidRequest, match=r"'a\.b' is a JPEG of more than 100 scans") as caught:
        read_image(head + scan * 101 + b"\xff\xd9", "a.b")
    assert caught.value.param == "a.b"
    hidden = b"\xff\xfe\0\x04\xff\xd9"  # a comment that spells the end
    with pytest.raises(InvalidRequest, match="scans"):
        read_image(head + (hidden + scan) * 101 + b"\xff\xd9")
    assert read_image(head + (hidden + scan) * 50 + b"\xff\xd9").width == 64


def test_what_stands_before_or_behind_a_jpeg_counts_as_no_scans() -> None:
    data = encoded(halves(64, 64), "JPEG", progressive=True)
    spelled = b"\xff\xda" * 200
    comment = b"\xff\xfe" + (len(spelled) + 2).to_bytes(2, "big") + spelled
    assert read_image(data[:2] + comment + data[2:] + spelled).pixels == read_image(data).pixels


def with_parts(kind: str, number: int) -> bytes:
    """An image that has so many parts which say nothing."""
    name, _, what = kind.partition(" of ")
    data = encoded(halves(64, 64).convert("P") if name == "GIF" else halves(64, 64), name)
    at = {"PNG": 33, "JPEG": 2, "GIF": 13 + 3 * 2 ** ((data[10] & 7) + 1)}[name]
    part = {
        "chunks": png_chunk(b"abCd"),
        "comments": b"\xff\xfe\0\x02",
        "padding": b"\xff",
        "extensions": b"\x21\xfe\0",
        "pieces": b"\x01a",
    }[what]
    inside = b"\x21\xfe" + part * number + b"\0" if what == "pieces" else part * number
    return data[:at] + inside + data[at:]


PARTS = ["PNG of chunks", "JPEG of comments", "JPEG of padding", "GIF of extensions", "GIF of pieces"]


@pytest.mark.parametrize("kind", PARTS)
def test_an_image_of_very_many_parts_is_refused_before_they_are_read(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read_image(with_parts(kind, MOST_PARTS // 2)).width == 64
    monkeypatch.setattr(decode, "_opened", None)
    with pytest.raises(InvalidRequest, match=r"'a\.b' is an image of more than 50000 parts") as caught:
        read_image(with_parts(kind, MOST_PARTS + 1), "a.b")
    assert caught.value.param == "a.b"


def test_a_broken_exif_block_makes_no_warnings() -> None:
    entries = b"".join(struct.pack(">HHII", tag, 2, 2**24, 8) for tag in range(1, 100))
    exif = b"Exif\0\0MM\0*\0\0\0\x08" + struct.pack(">H", 99) + entries + bytes(4)
    data = encoded(halves(), "JPEG", exif=exif)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        decode._image_module.cache_clear()
        read_image(data)
    decode._image_module.cache_clear()
    assert caught == []


def test_whether_an_image_is_plain_is_seen_without_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    plain, before = encoded(halves()), encoded(halves(), exif=turned)
    exif = before[before.index(b"eXIf") - 4 :][: 12 + int.from_bytes(before[before.index(b"eXIf") - 4 :][:4], "big")]
    behind = plain[:-12] + exif + plain[-12:]
    assert not is_plain(read_image(before)) and not is_plain(read_image(behind))
    file = read_image(plain)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)
    assert is_plain(file)
