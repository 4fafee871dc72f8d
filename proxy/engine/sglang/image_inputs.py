"""Images for the embedded SGLang: the tensors of the model's own processor, computed once per image.

With tensors, SGLang runs on exactly the ids that it is sent. With image files it would decode the ids into text and
encode the text again. Exports give trainers the same tensors as `multi_modal_inputs`.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from proxy.images.decode import decode_image
from proxy.images.prompt_images import PromptImages
from proxy.types import Ids, ImageFile, PlacedImage
from tokengrove.errors import EngineFailed

_FORMAT = "processor_output"
_MOST_BYTES, _PART = 16 * 2**30, 8
"""Limits of the cached tensors: `_MOST_BYTES`, and one part in `_PART` of the machine's memory. A screenshot of
1280 x 800 pixels takes 12.5 MB as tensors of Qwen2.5-VL in bfloat16."""

_Key = tuple[str, str]


class MakesInputs(Protocol):
    """The part of `proxy.vision.processor.VisionProcessor` that this module uses."""

    def inputs(self, images: Sequence[tuple[Any, str]]) -> Mapping[str, Any]:
        """Return the tensors of decoded images. `images`: pairs of image and detail."""


class ImageInputs:
    """An LRU cache of the tensors of images, of at most `most_bytes` (default: depending on the machine's memory).

    `dtype`: the dtype of the model, to which floating point tensors are converted; None: they keep the dtype of the
    processor. Use it on one event loop.
    """

    def __init__(self, processor: MakesInputs, dtype: Any = None, most_bytes: int | None = None) -> None:
        self._processor, self._dtype = processor, dtype
        self._most_bytes = most_bytes or min(_MOST_BYTES, _memory() // _PART)
        self._held: OrderedDict[_Key, Mapping[str, Any]] = OrderedDict()
        self._coming: dict[_Key, asyncio.Future[Mapping[str, Any]]] = {}
        self._bytes = 0

    async def of(self, images: PromptImages, ids: Ids) -> list[dict[str, Any]]:
        """Return SGLang's `image_data` for the images of the prompt `ids`. Raises InvalidRequest, EngineFailed.

        It is one dict for all images, since SGLang accepts only one of this format.
        """
        found = await self._tensors(images)
        data = await asyncio.to_thread(_joined, found)
        offsets = [_offset(image, ids) for image in images.placed]
        return [{"format": _FORMAT, **data, **({} if None in offsets else {"offsets": offsets})}]

    async def _tensors(self, images: PromptImages) -> list[Mapping[str, Any]]:
        """The tensors of each image. Tensors that other requests are computing are awaited."""
        wanted = {_key(image): image for image in images.placed}
        found = {key: self._held[key] for key in wanted if key in self._held}
        missing = [image for key, image in wanted.items() if key not in found and key not in self._coming]
        waiting = {key: self._coming[key] for key in wanted if key not in found and key in self._coming}
        for key in found:
            self._held.move_to_end(key)
        files = await images.read(missing) if missing else []
        for image, file in zip(missing, files, strict=True):
            waiting[_key(image)] = self._make(image, file)
        for key, coming in waiting.items():
            found[key] = await asyncio.shield(coming)
        return [found[_key(image)] for image in images.placed]

    def _make(self, image: PlacedImage, file: ImageFile) -> asyncio.Future[Mapping[str, Any]]:
        """Compute the tensors of an image in a thread, unless another request has started or finished that."""
        key = _key(image)
        if (held := self._held.get(key)) is not None:
            made = asyncio.get_running_loop().create_future()
            made.set_result(held)
            return made
        if (coming := self._coming.get(key)) is None:
            coming = asyncio.ensure_future(asyncio.to_thread(self._processed, file, image.detail))
            self._coming[key] = coming
            coming.add_done_callback(lambda done: self._keep(key, done))
        return coming

    def _keep(self, key: _Key, done: asyncio.Future[Mapping[str, Any]]) -> None:
        del self._coming[key]
        if done.cancelled() or done.exception() is not None:
            return
        self._held[key] = done.result()
        self._bytes += _size(done.result())
        while self._bytes > self._most_bytes:
            self._bytes -= _size(self._held.popitem(last=False)[1])

    def _processed(self, file: ImageFile, detail: str) -> Mapping[str, Any]:
        try:
            tensors = self._processor.inputs([(decode_image(file.data), detail)])
        except ValueError as error:
            raise EngineFailed(f"the model's processor does not take the image {file.digest}: {error}") from None
        if self._dtype is None:
            return tensors
        return {name: tensor.to(self._dtype) if _fractions(tensor) else tensor for name, tensor in tensors.items()}


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fractions(value: Any) -> bool:
    """True for a tensor of floating point numbers."""
    return bool(getattr(getattr(value, "dtype", None), "is_floating_point", False))


def _key(image: PlacedImage) -> _Key:
    return image.digest, image.detail


def _size(tensors: Mapping[str, Any]) -> int:
    return sum(int(getattr(tensor, "nbytes", 0)) for tensor in tensors.values())


def _joined(images: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the tensors of images along their first axis. Raises EngineFailed if their shapes do not fit."""
    if len(images) == 1:
        return dict(images[0])
    import torch

    try:
        return {name: torch.cat([image[name] for image in images]) for name in images[0]}
    except (KeyError, RuntimeError, TypeError) as error:
        raise EngineFailed(f"the tensors of {len(images)} images of this model cannot be joined: {error}") from None


def _offset(image: PlacedImage, ids: Ids) -> tuple[int, int] | None:
    """The first and last token of an image; None if other tokens are between them, so that SGLang must find them."""
    span = ids[image.start : image.start + image.length]
    return (image.start, image.start + image.length - 1) if span.count(span[0]) == image.length else None
