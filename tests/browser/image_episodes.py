"""Sessions of a vision model: screenshots in messages and results, edited histories, and bytes at their worst."""

from __future__ import annotations

import io
import random
import tempfile
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, PngImagePlugin

from proxy.engine.tiny.vision import build_tiny_vision_model
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from tests.browser import hostile
from tests.browser.feed import Feed
from tests.support import call_text, function_tool, system, tool_result, user

BROWSING, MANY, HOSTILE_IMAGES = "images/browsing", "images/many", "images/hostile"
"""Ids of sessions that tests open by name."""
SCREEN = (1280, 800)
MANY_TURNS = 60
CALL = call_text("computer", '{"action": "screenshot"}')
TOOLS = [function_tool("computer", {"action": {"type": "string"}})]


def seeing_renderer() -> Renderer:
    """The renderer of the tiny model that sees."""
    with tempfile.TemporaryDirectory() as folder:
        build_tiny_vision_model(Path(folder))
        return load_renderer(Settings(), Path(folder))


def screenshot(number: int, size: tuple[int, int] = SCREEN) -> Image.Image:
    """A drawing like a window with a list; another `number` gives another one."""
    chance, (wide, high) = random.Random(number), size
    image = Image.new("RGB", size, (244, 246, 248))
    draw = ImageDraw.Draw(image)
    draw.rectangle((0, 0, wide, high // 12), fill=tuple(chance.randrange(40, 140) for _ in range(3)))
    draw.text((wide // 60, high // 40), f"Orders, page {number}", fill="white")
    for row in range(2, 11):
        top, tall, colour = row * high // 12, high // 30, tuple(chance.randrange(60, 220) for _ in range(3))
        draw.rectangle(
            (wide // 20, top, wide // 20 + chance.randrange(wide // 4, wide // 2), top + tall), fill=(190, 200, 212)
        )
        draw.ellipse((wide * 9 // 10, top, wide * 9 // 10 + tall, top + tall), fill=colour)
    return image


@cache
def encoded(number: int, kind: str = "PNG", size: tuple[int, int] = SCREEN, **options: Any) -> bytes:
    """A screenshot as a file."""
    out = io.BytesIO()
    screenshot(number, size).save(out, kind, **options)
    return out.getvalue()


def shown(data: bytes, kind: str = "png", **more: Any) -> dict[str, Any]:
    """An image as a part of a message."""
    return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{b64encode(data).decode()}", **more}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


async def browsing(feed: Feed, session: str = BROWSING) -> None:
    """Three turns with screenshots; forks with the same picture encoded anew, with another one, and without it."""
    await feed.start(session, group_id="images")
    ask = {
        "role": "user",
        "content": [
            said("Two pages. The first: "),
            shown(encoded(1)),
            said(" and the second: "),
            shown(encoded(2), detail="low"),
            said(" Which has more orders?"),
        ],
    }
    first = await feed.turn(session, [ask], "I look at it.\n" + CALL, tools=TOOLS)
    result = tool_result(first["tool_calls"][0]["id"], "")

    def history(*content: Any) -> list[Any]:
        return [ask, first, {**result, "content": list(content)}]

    seen = history(said("Done. "), shown(encoded(3)))
    second = await feed.turn(session, seen, "The second one.", tools=TOOLS)
    await feed.turn(session, [*seen, second, user("Are you sure?")], "Yes.", tools=TOOLS)
    again = history(said("Done. "), shown(encoded(3, compress_level=1)))
    await feed.turn(session, again, "The same page, encoded anew.", tools=TOOLS)
    await feed.turn(session, history(said("Done. "), shown(encoded(4))), "Another page.", tools=TOOLS)
    await feed.turn(session, history(said("Done. [Image omitted]")), "No page.", tools=TOOLS)
    await feed.call(session, "set_reward", reward=1.0)


async def many(feed: Feed, session: str = MANY, turns: int = MANY_TURNS) -> None:
    """A session in which every message brings a screenshot."""
    await feed.start(session, group_id="images")
    history: list[Any] = [system("You click.")]
    for number in range(turns):
        history.append(
            {"role": "user", "content": [shown(encoded(100 + number, size=(640, 400))), said(f"Step {number}.")]}
        )
        history.append(await feed.turn(session, history, f"Click {number}."))


def worst() -> list[tuple[bytes, str]]:
    """Files that decode, with markup and scripts wherever their formats have room for them."""
    notes = PngImagePlugin.PngInfo()
    notes.add_text("Title", hostile.SCRIPT)
    notes.add_itxt("XML:com.adobe.xmp", hostile.SVG)
    png = encoded(5, size=(320, 200), pnginfo=notes)
    gif = encoded(6, "GIF", (320, 200), comment=hostile.EVERYTHING.encode()[:200])
    return [
        (png + hostile.EVERYTHING.encode(), "png"),
        (png, "svg+xml"),  # what the client says of a file is not believed
        (gif + hostile.SVG.encode(), "gif"),
        (encoded(7, "JPEG", (320, 200), comment=hostile.SCRIPT.encode()), "jpeg"),
        (encoded(8, "WEBP", (320, 200), xmp=hostile.SVG.encode()), "webp"),
    ]


async def hostile_images(feed: Feed, session: str = HOSTILE_IMAGES) -> None:
    """Such files between hostile texts."""
    await feed.start(session, task_id=hostile.SVG, group_id="images")
    parts = [
        part
        for text, (data, kind) in zip(hostile.TEXTS, worst(), strict=False)
        for part in (said(text), shown(data, kind))
    ]
    answer = await feed.turn(session, [{"role": "user", "content": parts}], hostile.EVERYTHING)
    await feed.turn(session, [{"role": "user", "content": parts}, answer, user(hostile.EVERYTHING)], hostile.IMAGE)
