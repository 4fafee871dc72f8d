"""The processor of one model: the text that replaces an image in a prompt, and the tensors of images.

The number of tokens of an image depends only on its size, so the processor is called with a blank image, once for each
size. `inputs` verifies that the tensors have as many tokens.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy.vision.load_processor import load_processor
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.image_detail import shown, shown_size

if TYPE_CHECKING:
    from PIL.Image import Image

# The number of sizes whose text is cached; each takes up to tens of kilobytes.
_SIZES = 1024
# The outputs of a tokenizer, which are returned together with the tensors of images.
_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")


class VisionProcessor:
    """The processor of the model in `folder`. Thread-safe. `placeholder`: the text that a chat template writes for an
    image."""

    def __init__(self, processor: Any, folder: Path) -> None:
        placeholder = getattr(processor, "image_token", None)
        if not isinstance(placeholder, str) or not placeholder:
            raise ConfigurationError(
                f"{type(processor).__name__} has no image_token, so images have no place in a text"
            )
        self.placeholder, self.folder = placeholder, folder
        self.name = type(processor).__name__
        self._processor = processor
        self._texts: OrderedDict[tuple[int, int], str] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path) -> VisionProcessor:
        """Load the processor of the model in `folder`. Raises ConfigurationError (one line)."""
        return cls(load_processor(folder), folder)

    @property
    def reserved(self) -> tuple[str, ...]:
        """The texts that the processor treats as an image, a video or a sound."""
        names = ("image_token", "video_token", "audio_token")
        return tuple([text for name in names if isinstance(text := getattr(self._processor, name, None), str)])

    def knows(self, width: int, height: int, detail: str = "") -> bool:
        """Whether `expansion` is cached for this size."""
        return shown_size(width, height, detail) in self._texts

    def expansion(self, width: int, height: int, detail: str = "") -> str:
        """Return the text that replaces `placeholder` for an image of this size in pixels.

        Takes up to a second for a new size. Raises InvalidRequest for a size that the processor refuses.
        """
        size = shown_size(width, height, detail)
        with self._lock:
            if (text := self._texts.get(size)) is not None:
                self._texts.move_to_end(size)
                return text
        text = self._expanded(size)
        with self._lock:
            self._texts[size] = text
            while len(self._texts) > _SIZES:
                self._texts.popitem(last=False)
        return text

    def inputs(self, images: Sequence[tuple[Image, str]], tensors: str = "pt") -> dict[str, Any]:
        """Return the model's inputs in addition to the ids: `pixel_values`, `image_grid_thw` and any others.

        `images`: decoded, each with its detail, in the order of the prompt. `tensors`: `pt` for torch, `np` for numpy.
        Raises ValueError if the images have other tokens than `expansion` gives.
        """
        if not images:
            return {}
        shown_images = [shown(image, detail) for image, detail in images]
        text = self.placeholder * len(images)
        found = self._processor(
            text=[text], images=shown_images, return_tensors=tensors, return_text_replacement_offsets=True
        )
        expected = [self.expansion(*image.size) for image in shown_images]
        given = [offset["replacement"] for offset in found["text_replacement_offsets"][0]]
        if given != expected:
            raise ValueError(f"{self.name} expands these images to other tokens than blank images of their sizes")
        return {name: value for name, value in found.items() if name not in _OF_TEXT}

    def _expanded(self, size: tuple[int, int]) -> str:
        from PIL import Image

        try:
            found = self._processor(
                text=[self.placeholder], images=[Image.new("RGB", size)], return_text_replacement_offsets=True
            )
        except Exception as error:  # processors raise arbitrary exceptions
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"this model cannot take an image of {size[0]} x {size[1]} pixels: {reason}"
            raise InvalidRequest(message, param="messages") from error
        return str(found["text_replacement_offsets"][0][0]["replacement"])
