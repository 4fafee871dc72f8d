"""The size of an image for the model, by the client's `detail`. Engines, exports and recorded sizes all use it.

`low`: the image is scaled down before the model's processor so that neither side is longer than `LOW_DETAIL` pixels;
smaller images are unchanged. `high` and "" (`auto`): the image is unchanged, and the processor applies its model's
limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

LOW_DETAIL = 512
"""The longest side of an image with detail `low`, in pixels."""


def shown_size(width: int, height: int, detail: str = "") -> tuple[int, int]:
    """Return the width and height, in pixels, of the processor's input."""
    longest = max(width, height)
    if detail != "low" or longest <= LOW_DETAIL:
        return width, height
    return tuple(max(1, round(side * LOW_DETAIL / longest)) for side in (width, height))  # type: ignore[return-value]


def shown(image: Image, detail: str = "") -> Image:
    """Return the processor's input: `image` itself, or a smaller copy."""
    size = shown_size(image.width, image.height, detail)
    if size == image.size:
        return image
    from PIL.Image import Resampling

    return image.resize(size, Resampling.BICUBIC)
