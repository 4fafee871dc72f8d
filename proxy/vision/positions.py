"""Positions of tokens in models that place images in space (mrope): the model's own rule, without its weights.

Such a model rotates keys and queries by three positions: time, height and width. Text tokens have three equal
positions; image tokens have the positions of the image's grid. After an image, positions continue after its longer
side, so they depend on all images before. Relative to its beginning, the positions of an image are always the same:
the rule is evaluated once for each grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

# The number of cached grids: the positions of an image of 4000 tokens take 96 kB, and clients choose the image sizes.
_GRIDS = 256

Span = tuple[int, int]
"""The tokens of an image in a sequence: their start and their number."""

Grid = tuple[int, int, int]
"""A row of `image_grid_thw`: the number of the vision model's patches of an image in time, height and width."""


class Positions:
    """The rule of one model. `shell`: an object of its class without weights; None if the model only counts tokens."""

    def __init__(self, shell: Any) -> None:
        self._shell = shell
        self._image = lru_cache(_GRIDS)(self._computed)

    @property
    def three(self) -> bool:
        """Whether the model has three positions for each token."""
        return self._shell is not None

    def of(self, spans: Sequence[Span], grids: Sequence[Grid], tokens: int) -> np.ndarray[Any, Any] | None:
        """Return the positions, int64 [3, tokens], of a sequence with images in `spans`; None unless the model has
        `three`.

        `grids`: one for each span, in their order. Tokens after the last image, also sampled ones, count as text.
        """
        if self._shell is None:
            return None
        import numpy as np

        placed = np.empty((3, tokens), dtype=np.int64)
        done = position = 0
        for (start, length), grid in zip(spans, grids, strict=True):
            placed[:, done:start] = np.arange(position, position + start - done)
            position += start - done
            image, advance = self._image(length, grid)
            placed[:, start : start + length] = image + position
            done, position = start + length, position + advance
        placed[:, done:] = np.arange(position, position + tokens - done)
        return placed

    def _computed(self, length: int, grid: Grid) -> tuple[np.ndarray[Any, Any], int]:
        """The positions [3, length] of an image that begins at 0, and the position of the token after it."""
        import torch

        kinds = torch.ones((1, length + 1), dtype=torch.int32)
        kinds[0, -1] = 0
        ids = torch.zeros((1, length + 1), dtype=torch.int64)  # only their number is read
        rows = torch.tensor([grid], dtype=torch.int64)
        found, _ = self._shell.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=rows)
        found = found[:, 0].numpy()
        return found[:, :-1], int(found[0, -1])


def positions_of(config: Any) -> Positions:
    """The rule of the model with this transformers `config`."""
    import torch
    import transformers

    known = transformers.AutoModel._model_mapping
    kind = known.get(type(config), None)
    if kind is None or not hasattr(kind, "get_rope_index"):
        return Positions(None)
    shell = kind.__new__(kind)
    torch.nn.Module.__init__(shell)
    shell.config = config
    return Positions(shell)


@cache
def positions_in(folder: Path) -> Positions:
    """The rule of the model in `folder`, which is read once."""
    from transformers import AutoConfig

    return positions_of(AutoConfig.from_pretrained(folder, local_files_only=True))


def mrope_positions(
    folder: Path, spans: Sequence[Span], grids: Sequence[Grid], tokens: int
) -> np.ndarray[Any, Any] | None:
    """Return the positions, int64 [3, tokens], of a sequence for the model in `folder`; None if it has no mrope."""
    return positions_in(folder).of(spans, grids, tokens)
