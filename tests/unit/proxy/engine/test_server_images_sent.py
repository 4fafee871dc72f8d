"""Images as servers get them: PNGs that every decoder reads as our pixels, encoded once, and prompts around them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import pytest
from PIL import Image

from proxy.engine.servers.sent_images import SentImages, SentPrompt, collapsed, salted
from proxy.images.decode import decode_image, read_image
from proxy.images.image_pool import ImagePool
from proxy.images.plain import is_plain
from proxy.images.prompt_images import PromptImages
from proxy.images.quoted import without_images
from proxy.prompt_ids import PromptIds
from proxy.types import ImageFile, ids_of
from tests.engines.pictures import drawn
from tests.engines.spans import around
from tests.engines.wire import IMAGE
from tests.vision import noting_loops

PICTURE = Image.open(BytesIO(drawn(1, 84, 56).data)).convert("RGB")


def saved(image: Image.Image, kind: str, **options: Any) -> ImageFile:
    out = BytesIO()
    image.save(out, kind, **options)
    return read_image(out.getvalue())


def turned() -> dict[str, Any]:
    exif = Image.Exif()
    exif[0x0112] = 6
    return {"exif": exif}


def clear() -> Image.Image:
    image = PICTURE.convert("RGBA")
    image.putalpha(100)
    return image


KINDS: dict[str, tuple[bool, Callable[[], ImageFile]]] = {
    "colours": (True, lambda: saved(PICTURE, "PNG")),
    "grey": (True, lambda: saved(PICTURE.convert("L"), "PNG")),
    "palette": (True, lambda: saved(PICTURE.convert("P"), "PNG")),
    "opaque, of four channels": (False, lambda: saved(PICTURE.convert("RGBA"), "PNG")),
    "half transparent": (False, lambda: saved(clear(), "PNG")),
    "a transparent colour": (False, lambda: saved(PICTURE.convert("P"), "PNG", transparency=0)),
    "16 bits": (False, lambda: saved(Image.new("I;16", (84, 56), 40_000), "PNG")),
    "turned": (False, lambda: saved(PICTURE, "PNG", **turned())),
    "moving": (False, lambda: saved(PICTURE, "PNG", save_all=True, append_images=[Image.new("RGB", (84, 56))])),
    "JPEG": (False, lambda: saved(PICTURE, "JPEG")),
    "turned JPEG": (False, lambda: saved(PICTURE, "JPEG", **turned())),
    "GIF": (False, lambda: saved(PICTURE, "GIF")),
    "WebP": (False, lambda: saved(PICTURE, "WEBP")),
}


async def sent(file: ImageFile, salt: str = "") -> bytes:
    """The bytes that a server decodes from the data URL of an image."""
    _, placed = around(file)
    images = PromptImages(placed, ImagePool(nowhere, 0), {file.digest: file})
    (url,) = json.loads(b"[" + b"".join(salted(await SentImages().urls(images), salt)) + b"]")
    return base64.b64decode(url.removeprefix("data:image/png;base64,"), validate=True)


async def test_an_image_in_two_details_is_sent_in_two_sizes() -> None:
    file = saved(PICTURE.resize((1120, 560)), "PNG")
    placed = (*around(file)[1], *around(file, detail="low")[1])
    whole, low = await SentImages().urls(PromptImages(placed, ImagePool(nowhere, 0), {file.digest: file}))
    sizes = [Image.open(BytesIO(base64.b64decode(url.partition(b",")[2]))).size for url in (whole, low)]
    assert sizes == [(1120, 560), (512, 256)]


async def nowhere(digests: Sequence[str]) -> Sequence[ImageFile]:
    raise AssertionError("the store is not asked for bytes that came with the request")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_that_only_converts_to_rgb_decodes_our_pixels(kind: str) -> None:
    plain, make = KINDS[kind]
    file = make()
    assert is_plain(file) is plain
    data = await sent(file, "7")
    assert data.startswith(file.data) is plain
    assert Image.open(BytesIO(data)).convert("RGB").tobytes() == decode_image(file.data).tobytes()


async def test_no_image_for_a_server_is_decoded_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    file = saved(PICTURE, "WEBP")
    held = noting_loops(monkeypatch)
    await sent(file)
    assert held == [False]


async def test_a_salt_makes_other_bytes_of_the_same_pixels() -> None:
    one, other, plain = [await sent(drawn(3), salt) for salt in ("1", "2", "")]
    assert len({one, other, plain}) == 3
    assert len({Image.open(BytesIO(data)).convert("RGB").tobytes() for data in (one, other, plain)}) == 1


async def test_low_detail_is_sent_as_small_as_the_model_sees_it() -> None:
    file = drawn(5, 1024, 640)
    _, placed = around(file, detail="low")
    images = PromptImages(placed, ImagePool(nowhere, 0), {file.digest: file})
    (url,) = await SentImages().urls(images)
    assert Image.open(BytesIO(base64.b64decode(url.partition(b",")[2]))).size == (512, 320)


async def test_an_image_is_read_and_encoded_once_while_there_is_room() -> None:
    files = [drawn(seed) for seed in range(3)]
    asked: list[str] = []

    async def read(digests: Sequence[str]) -> Sequence[ImageFile]:
        asked.extend(digests)
        return [file for file in files if file.digest in digests]

    kept, pool = SentImages(), ImagePool(read, 0)
    first = await kept.urls(PromptImages(around(*files[:2])[1], pool, {}))
    again = await kept.urls(PromptImages(around(files[1], files[0], files[1], files[2])[1], pool, {}))
    assert [again[at] for at in (0, 1, 2)] == [first[1], first[0], first[1]] and again[1] is first[0]
    assert sorted(asked) == sorted(file.digest for file in files)

    small = SentImages(most_bytes=len(first[0]) + len(first[1]))
    await small.urls(PromptImages(around(*files)[1], pool, {}))
    await small.urls(PromptImages(around(files[2])[1], pool, {}))
    assert asked.count(files[2].digest) == 2
    await small.urls(PromptImages(around(files[0])[1], pool, {}))
    assert asked.count(files[0].digest) == 3


def test_a_prompt_has_one_placeholder_for_each_image() -> None:
    ids, placed = around(drawn(1, 84, 56), drawn(2, 56, 56))
    short = collapsed(PromptIds(ids[:20], ids[20:]), placed)
    assert short.tolist() == [*range(40, 50), IMAGE, *range(50, 55), IMAGE, *range(50, 55)]
    assert collapsed(PromptIds(ids), ()) == ids
    text = b"".join(SentPrompt(short, [b',"x":[1]']).json())
    assert json.loads(b'{"ids":' + text + b"}") == {"ids": short.tolist(), "x": [1]}


def test_a_quoted_image_is_left_out_of_a_message() -> None:
    url = "data:image/png;base64," + base64.b64encode(drawn(1).data).decode()
    assert without_images(f"Error while loading data {url[:100]}...: broken") == (
        "Error while loading data (an image)...: broken"
    )
    assert without_images(str(ids_of([1]))) == "array('i', [1])"
