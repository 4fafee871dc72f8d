"""The inputs of a vision model's trainer besides token ids: the processor's tensors, and positions in three axes.

Both equal the values that the engine computed with: the same processor, the same decoding, the same rule.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from proxy.types import PlacedImage
from proxy.vision.processor import VisionProcessor
from tokengrove.errors import ConfigurationError, how_to_get
from tokengrove.image_detail import shown_size

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

    from proxy.vision.positions import Grid, Positions

_GRIDS = "image_grid_thw"
# The number of image sizes whose grids are cached.
_SIZES = 4096


def load_sample_inputs(processor: VisionProcessor) -> SampleInputs:
    """Load the rule of positions of the processor's model. Raises ConfigurationError (one line) without torch."""
    try:
        from proxy.vision.positions import positions_in

        return SampleInputs(processor, positions_in(processor.folder))
    except ImportError as error:
        how = how_to_get("tokengrove[cpu]")
        raise ConfigurationError(f"the positions of the model need the package {error.name}; {how}") from None


class SampleInputs:
    """The inputs of one model. Thread-safe. All methods block while an image is decoded and scaled."""

    def __init__(self, processor: VisionProcessor, positions: Positions) -> None:
        self._processor, self._positions = processor, positions
        self._grids: OrderedDict[tuple[int, int], Grid] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def three(self) -> bool:
        """Whether the model has three positions for each token."""
        return self._positions.three

    def arrays(self, image: Image, detail: str) -> dict[str, NDArray[Any]]:
        """The processor's arrays of one decoded image, by its names: for Qwen's models `pixel_values` float32
        [patches, values] and `image_grid_thw` int64 [1, 3]. The arrays of several images are concatenated."""
        return dict(self._processor.inputs([(image, detail)], tensors="np"))

    def positions(self, images: Sequence[PlacedImage], tokens: int) -> NDArray[np.int64]:
        """The positions, int64 [3, tokens], of a sequence with these images. Only with `three`."""
        spans = [(image.start, image.length) for image in images]
        grids = [self._grid(shown_size(image.width, image.height, image.detail)) for image in images]
        found = self._positions.of(spans, grids, tokens)
        assert found is not None
        return found

    def _grid(self, size: tuple[int, int]) -> Grid:
        """The grid of an image of this size, which depends on nothing else. Computed once, with a blank image."""
        with self._lock:
            if (grid := self._grids.get(size)) is not None:
                self._grids.move_to_end(size)
                return grid
        from PIL.Image import new

        time, height, width = self._processor.inputs([(new("RGB", size), "")], tensors="np")[_GRIDS][0].tolist()
        with self._lock:
            self._grids[size] = time, height, width
            if len(self._grids) > _SIZES:
                self._grids.popitem(last=False)
        return time, height, width
