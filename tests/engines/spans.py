"""Prompts with images for simulated servers: an image has one placeholder for each 28 x 28 pixels."""

from __future__ import annotations

from proxy.types import Ids, ImageFile, PlacedImage, ids_of
from tests.engines.wire import IMAGE


def around(*images: ImageFile, detail: str = "", spare: int = 0) -> tuple[Ids, tuple[PlacedImage, ...]]:
    """Ids with images between texts. `spare`: placeholders that each image has too many."""
    ids, placed = ids_of(range(40, 50)), []
    for image in images:
        length = (image.width // 28) * (image.height // 28) + spare
        placed.append(PlacedImage(image.digest, len(ids), length, image.width, image.height, detail))
        ids.extend([*[IMAGE] * length, *range(50, 55)])
    return ids, tuple(placed)
