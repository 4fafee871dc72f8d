"""Games as pictures: each content of a cell is a square with its own colour and mark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokengrove.errors import InvalidRequest

Colour = tuple[int, int, int]
RENDER_MODES = ("text", "rgb_array")
"""A map as text, or a picture: uint8 [height, width, 3]."""


class Tile(NamedTuple):
    """How a cell is drawn: its ground, and its mark if any: a `disc`, a `box` or a `ring`."""

    ground: Colour
    mark: str = ""
    colour: Colour = (0, 0, 0)


def draw(codes: Sequence[Sequence[int]], tiles: Mapping[int, Tile], pixels: int) -> NDArray[np.uint8]:
    """The picture of a map of codes, uint8 [rows * pixels, columns * pixels, 3]; a cell has `pixels` x `pixels`."""
    drawn = {code: _drawn(tile, pixels) for code, tile in tiles.items()}
    rows = [np.concatenate([drawn[code] for code in row], axis=1) for row in codes]
    return np.concatenate(rows, axis=0)


def cell_pixels(given: int) -> int:
    """The size of a cell. Raises InvalidRequest if it is too small for the marks."""
    if given < 8:
        raise InvalidRequest(f"cell_pixels is {given}; a cell has at least 8", param="cell_pixels")
    return given


def _drawn(tile: Tile, pixels: int) -> NDArray[np.uint8]:
    square = np.empty((pixels, pixels, 3), np.uint8)
    square[:] = tile.ground
    square[0], square[:, 0] = 40, 40  # a line between cells
    if tile.mark:
        square[_marked(tile.mark, pixels)] = tile.colour
    return square


def _marked(mark: str, pixels: int) -> NDArray[np.bool_]:
    """The pixels of a mark: bool [pixels, pixels]."""
    across = (np.arange(pixels) + 0.5) / pixels - 0.5
    x, y = across[None, :], across[:, None]
    if mark == "box":
        return np.broadcast_to(np.maximum(abs(x), abs(y)) < 0.36, (pixels, pixels))
    far = np.hypot(x, y)
    return (far < 0.36) & (far > 0.2) if mark == "ring" else far < 0.36
