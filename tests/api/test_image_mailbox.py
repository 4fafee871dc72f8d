"""The mailbox with images: whoever answers learns where they are in the prompt, and gets their bytes on request."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from pathlib import Path

from proxy.rendering import Renderer
from tests.mailboxes import posting
from tests.support import user
from tests.vision import image_url, png, text_part


async def test_a_request_shows_its_images_and_their_bytes_on_request(tmp_path: Path, vision_renderer: Renderer) -> None:
    first, second = png(100, 60, 1), png(64, 64, 2)
    async with posting(tmp_path, vision_renderer) as server:
        content = [text_part("see "), image_url(first), image_url(second)]
        agent = asyncio.create_task(server.chat([{"role": "user", "content": content}]))
        letter = await server.letter()
        assert vision_renderer.images is not None
        token = vision_renderer.images.token
        for image, (width, height) in zip(letter["images"], [(100, 60), (64, 64)], strict=True):
            assert (image["width"], image["height"]) == (width, height)
            span = letter["input_ids"][image["start"] : image["start"] + image["length"]]
            assert span == [token] * image["length"]
        assert [image["digest"] for image in letter["images"]] == [
            image["digest"] for image in letter["messages"][0]["images"]
        ]
        again = await server.letter(images="bytes")
        assert [b64decode(image["data"]) for image in again["images"]] == [first, second]
        assert {image["media_type"] for image in again["images"]} == {"image/png"}
        assert "data" not in letter["images"][0]
        await server.deliver(letter, text="two pictures")
        assert (await agent)["choices"][0]["message"]["content"] == "two pictures"


async def test_a_request_without_images_has_none(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with posting(tmp_path, vision_renderer) as server:
        agent = asyncio.create_task(server.chat([user("hi")]))
        letter = await server.letter(images="bytes")
        assert letter["images"] == []
        await server.deliver(letter, text="hello")
        await agent


async def test_another_wish_for_images_is_refused(tmp_path: Path, vision_renderer: Renderer) -> None:
    async with posting(tmp_path, vision_renderer) as server:
        refused = await server.post("/mailbox/next", {"images": "urls"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "images")
