"""What a model is shown of an image, by the `detail` that the client asked for. Engines, exports and sizes all use it.

`low`: scaled down so that neither side is longer than `LOW_DETAIL` pixels, before the model's processor sees it;
smaller images stay as they are. `high` and "" (`auto`): as it is; the processor then applies the limits of its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

LOW_DETAIL = 512
"""The longest side of an image with detail `low`, in pixels."""


def shown_size(width: int, height: int, detail: str = "") -> tuple[int, int]:
    """Return the width and height, in pixels, of the image that the processor gets."""
    longest = max(width, height)
    if detail != "low" or longest <= LOW_DETAIL:
        return width, height
    return tuple(max(1, round(side * LOW_DETAIL / longest)) for side in (width, height))  # type: ignore[return-value]


def shown(image: Image, detail: str = "") -> Image:
    """Return the image that the processor gets: `image` itself, or a smaller one."""
    size = shown_size(image.width, image.height, detail)
    if size == image.size:
        return image
    from PIL.Image import Resampling

    return image.resize(size, Resampling.BICUBIC)
