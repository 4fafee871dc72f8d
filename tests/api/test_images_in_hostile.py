"""Images that are broken, huge or something else: each is a 400 that names its field, and the server goes on."""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode, urlsafe_b64encode
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from proxy.rendering.renderer import Renderer
from tests.support import Server, says, serving
from tests.vision import data_url, png

FIELD = "'messages[0].content[0].image_url.url'"
GOOD = png(seed=3)


@pytest.fixture
async def server(tmp_path: Path, vision_renderer: Renderer) -> AsyncIterator[Server]:
    async with serving(tmp_path, says(*["fine"] * 9), vision_renderer, max_image_bytes=100_000) as running:
        yield running


async def send(server: Server, url: str) -> Any:
    part = {"type": "image_url", "image_url": {"url": url}}
    return await server.post("/s/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]})


def encoded(kind: str, mode: str = "RGB", size: tuple[int, int] = (40, 30), **options: Any) -> bytes:
    from PIL import Image

    file = BytesIO()
    Image.new(mode, size).save(file, kind, **options)
    return file.getvalue()


def claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims a size, with the data of one line."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = (header, b"IDAT" + zlib.compress(b"\0"))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk)) for chunk in chunks
    )


BAD = {
    "30000 x 30000": (claiming(30_000, 30_000), "more pixels than are allowed (--max-image-pixels)"),
    "2 billion": (claiming(2**31 - 1, 1), "more pixels than are allowed"),
    "one pixel too many": (claiming(6001, 6000), "6001 x 6000 pixels; at most 36000000 pixels are allowed"),
    "more pixels than Pillow reads": (claiming(200_000, 200_000), "more pixels than are allowed"),
    "one pixel wide": (claiming(1, 36_000_000), "1 x 36000000 pixels; a side may have at most 32768"),
    "narrow": (claiming(2, 401), "2 x 401 pixels; the longer side may have at most 200 times"),
    "truncated": (GOOD[: len(GOOD) // 2], "broken"),
    "truncated JPEG": (encoded("JPEG", size=(300, 300))[:-200], "broken"),
    "SVG": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no PNG, JPEG, WebP or GIF"),
    "HTML as PNG": (b"<!doctype html><script>alert(1)</script>", "no PNG, JPEG, WebP or GIF"),
    "BMP": (encoded("BMP"), "no PNG, JPEG, WebP or GIF"),
    "PostScript": (b"%!PS-Adobe-3.0 EPSF-3.0\n", "no PNG, JPEG, WebP or GIF"),
    "nothing": (b"", "empty"),
    "too many bytes": (GOOD + bytes(100_000), "at most 100000 are allowed (--max-image-bytes)"),
}


@pytest.mark.parametrize("what", BAD)
async def test_bad_images_are_refused_and_the_server_goes_on(server: Server, what: str) -> None:
    data, says_so = BAD[what]
    answer = await send(server, data_url(data))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(FIELD)
    assert says_so in error["message"]
    assert error["param"] == FIELD.strip("'")
    assert (await send(server, data_url(GOOD))).status_code == 200


@pytest.mark.parametrize(
    "url",
    [
        *(
            "",
            "picture.png",
            "file:///etc/passwd",
            "ftp://h/a.png",
            "data:",
            "data:image/png,abc",
            "data:image/png;base64",
        ),
        *(
            "data:image/svg+xml;utf8,<svg/>",
            "data:image/png;base64,****",
            "data:image/png;base64,\u00e9",
            "javascript:x",
        ),
    ],
)
async def test_texts_that_are_no_image_are_refused(server: Server, url: str) -> None:
    answer = await send(server, url)
    assert answer.status_code == 400, answer.text
    assert FIELD in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "url",
    [
        *(data_url(GOOD), data_url(GOOD, "image/jpeg"), data_url(GOOD, ""), data_url(GOOD, "image/png;name=a.png")),
        *(data_url(GOOD, "IMAGE/PNG;charset=utf-8").replace("data:", "DATA:"), data_url(GOOD).rstrip("=")),
        *(b64encode(GOOD).decode(), "data:image/png;base64," + urlsafe_b64encode(GOOD).decode()),
        *(data_url(GOOD).replace("A", "A\n"), "data:image/png;base64," + quote(b64encode(GOOD).decode())),
    ],
)
async def test_all_spellings_of_a_data_url_are_the_same_image(server: Server, url: str) -> None:
    answer = await send(server, url)
    assert answer.status_code == 200, answer.text
    images = server.engine.requests[-1].images
    assert images is not None
    assert [file.data for file in await images.read()] == [GOOD]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (encoded("PNG", size=(1, 1)), (1, 1)),
        (encoded("GIF", "P"), (40, 30)),
        (encoded("GIF", "P", save_all=True, append_images=[]), (40, 30)),
        (encoded("JPEG", "CMYK"), (40, 30)),
        (encoded("PNG", "I;16"), (40, 30)),
        (encoded("PNG", "LA"), (40, 30)),
        (encoded("WEBP", "RGBA"), (40, 30)),
        (encoded("JPEG", exif=b"Exif\0\0MM\0\x2a\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"), (30, 40)),
    ],
    ids=["1x1", "GIF", "animated GIF", "CMYK", "16 bits", "grey with alpha", "WebP with alpha", "turned by EXIF"],
)
async def test_rare_images_are_taken_with_the_size_that_they_are_seen_in(
    server: Server, data: bytes, size: tuple[int, int]
) -> None:
    answer = await send(server, data_url(data))
    assert answer.status_code == 200, answer.text
    images = server.engine.requests[-1].images
    assert images is not None
    assert [(image.width, image.height) for image in images.placed] == [size]


async def test_a_body_beyond_the_limit_says_so(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with serving(tmp_path, says("a"), vision_renderer, max_body_bytes=1000) as server:
        answer = await send(server, data_url(GOOD + bytes(2000)))
        assert answer.status_code == 413
        assert "--max-body-bytes" in answer.text
