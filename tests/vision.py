"""Models that see, and images for them: a tiny folder of each kind, built once in a test session, and small PNGs."""

from __future__ import annotations

import asyncio
import io
import random
from base64 import b64encode
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from proxy.images import decode
from proxy.images.decode import read_image
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.settings import Settings
from proxy.types import ImageFile, ImagePart

KINDS = ("qwen2_5_vl", "qwen3_vl")


@pytest.fixture(scope="session")
def vision_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder of the tiny model of each kind."""
    from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model

    folders = {}
    for kind in VisionKind:
        folders[str(kind)] = tmp_path_factory.mktemp(str(kind))
        build_tiny_vision_model(folders[str(kind)], kind)
    return folders


@pytest.fixture(scope="session")
def vision_folder(vision_folders: dict[str, Path]) -> Path:
    """The folder of the tiny Qwen2.5-VL model."""
    return vision_folders["qwen2_5_vl"]


@pytest.fixture(scope="session")
def vision_renderer(vision_folder: Path) -> Renderer:
    """The renderer of the tiny Qwen2.5-VL model."""
    return load_renderer(Settings(), vision_folder)


@cache
def png(width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    """Return a PNG of coloured rectangles; another `seed` gives another picture."""
    from PIL import Image, ImageDraw

    chance = random.Random(seed)
    image = Image.new("RGB", (width, height), tuple(chance.randrange(256) for _ in range(3)))
    draw = ImageDraw.Draw(image)
    for _ in range(4):
        left, top = chance.randrange(width), chance.randrange(height)
        colour = tuple(chance.randrange(256) for _ in range(3))
        draw.rectangle((left, top, left + width // 3, top + height // 3), fill=colour)
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@cache
def image_file(width: int = 64, height: int = 48, seed: int = 0) -> ImageFile:
    """Return a PNG as the server holds it."""
    return read_image(png(width, height, seed), "image", most_pixels=2**26, most_bytes=2**26)


def part(file: ImageFile, at: int = 0, detail: str = "") -> ImagePart:
    """Return an image in a message, after `at` characters of its text."""
    return ImagePart(file.digest, at, file.width, file.height, detail)


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(data).decode()}"


def image_url(data: bytes, **more: Any) -> dict[str, Any]:
    """Return an image as a part of a chat message."""
    return {"type": "image_url", "image_url": {"url": data_url(data), **more}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def noting_loops(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list that says of each image that is opened from now on whether that held up an event loop."""
    held: list[bool] = []
    opened = decode._opened

    def noting(data: bytes) -> Any:
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            held.append(False)
        else:
            held.append(True)
        return opened(data)

    monkeypatch.setattr(decode, "_opened", noting)
    return held
