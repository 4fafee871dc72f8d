"""The sight of a vision model: its processor, its images and its forward pass with images, as one object."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from proxy.engine.requests import GenerateRequest
from proxy.engine.transformers.batching import StepEntry
from proxy.engine.transformers.seen_images import SeenImage, SeenImages, SeenName
from proxy.engine.transformers.seen_prompt import Placeholders, SeenPrompt, check_placeholders, see
from proxy.engine.transformers.vision_forward import VisionForward
from proxy.images.prompt_images import PromptImages
from proxy.types import ImageFile, PlacedImage
from proxy.vision.model_config import placeholder_ids
from proxy.vision.positions import positions_of
from proxy.vision.processor import VisionProcessor

_READ_TIMEOUT_S = 30.0
"""Limit in seconds for reading the bytes of an image."""

# Decoding and scaling an image of 36 million pixels takes half a gigabyte, so such images are prepared one at a time.
_LARGE_PIXELS = 4_000_000
# An image that comes again has another token, so only current requests need these.
_MOST_FAILURES = 1024


class Sight:
    """`images`: the images that are known. `placeholders`: the ids that are never sampled."""

    def __init__(self, model: Any, folder: Path, cache_mb: int, entries: Callable[[], Sequence[StepEntry]]) -> None:
        """Register the hooks of `model`. `entries` returns the requests of the current step.

        Raises ConfigurationError if the folder has no processor that can be loaded.
        """
        config = model.config
        self.placeholders = Placeholders(config.image_token_id, placeholder_ids(folder))
        vocab_size = int(config.get_text_config().vocab_size)
        self.images = SeenImages(model, VisionProcessor.load(folder), vocab_size, cache_mb * 2**20)
        self._rule = positions_of(config)
        self._failures: dict[int, str] = {}
        self._large = ThreadPoolExecutor(1, thread_name_prefix="tokengrove-large-images")
        VisionForward(model, self.images, self.placeholders.image, entries, self._fail)

    async def see(self, request: GenerateRequest) -> SeenPrompt | None:
        """Return the prompt for the batch; None without images. Raises InvalidRequest if ids and images do not fit."""
        ids = request.input_ids
        if request.images is None or not request.images.placed:
            check_placeholders(ids, self.placeholders, 0)
            return None
        placed = request.images.placed
        needed = [image for image in placed if self.images.needs(SeenName(image.digest, image.detail))]
        files = {file.digest: file for file in await request.images.read(needed)} if needed else {}
        loop = asyncio.get_running_loop()
        sources = [partial(_read, request.images, image, files.get(image.digest), loop) for image in placed]
        large = any(file.width * file.height > _LARGE_PIXELS for file in files.values())
        work = partial(see, self.images, self._rule, self.placeholders, ids, placed, sources)
        return await loop.run_in_executor(self._large if large else None, work)

    def failure(self, prompt: SeenPrompt) -> str | None:
        """The reason why the model could not see an image of the prompt; None if it saw all."""
        if not self._failures:
            return None
        found = (self._failures.get(placed.image.token) for placed in prompt.images)
        return next((reason for reason in found if reason is not None), None)

    def _fail(self, image: SeenImage, error: Exception) -> None:
        self._failures[image.token] = f"the model could not see the image {image.name.digest}: {error}"
        if len(self._failures) > _MOST_FAILURES:
            del self._failures[next(iter(self._failures))]


def _read(
    images: PromptImages, image: PlacedImage, file: ImageFile | None, loop: asyncio.AbstractEventLoop
) -> ImageFile:
    """Return `file`, or read it on its event loop.

    A known image is read only if its keys and values, and its features, have been evicted.
    """
    if file is not None:
        return file
    (read,) = asyncio.run_coroutine_threadsafe(images.read([image]), loop).result(_READ_TIMEOUT_S)
    return read
