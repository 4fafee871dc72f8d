"""Images as the model sees them: the number of tokens of each, and the features that replace these tokens.

Features belong to the weights that computed them, and `forget` drops them when weights change. They are computed only
on the batching thread, when tokens of an image are processed, so they are never older than the step that uses them.
Pixel tensors, which take longer on the host, are prepared in worker threads. All tokens of an image have the same id
above the vocabulary, so that prompts with different images differ for the prefix cache.
"""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.images.decode import decode_image
from proxy.types import ImageFile
from proxy.vision.positions import Grid
from proxy.vision.processor import VisionProcessor

if TYPE_CHECKING:
    import torch

_MOST_KNOWN = 65_536
"""The number of images with a remembered id. The prefix cache no longer finds images that were forgotten."""

_MOST_PREPARED_BYTES = 512 * 2**20
"""Bytes of the newest pixel tensors that wait for the batching thread. It computes others when they are needed."""


Source = Callable[[], ImageFile]
"""A function that returns the bytes of an image. It may wait for the event loop, so call it only on other threads."""


class SeenName(NamedTuple):
    """The key of an image: what the model sees depends on its bytes and the requested detail."""

    digest: str
    detail: str


@dataclass(slots=True, eq=False)
class SeenImage:
    """An image as this model sees it. `token`: its id above the vocabulary. `length`: its number of tokens.

    `epoch`: the epoch of the KV cache, which `emptied` increments, when its features were last used.
    """

    name: SeenName
    token: int
    grid: Grid
    length: int
    epoch: int = -1


class Features(NamedTuple):
    """Tensors [length, width of the text model] on the model's device.

    `embeds`: the embeddings. `deepstack`: one tensor for each of the first layers, which is added to its output.
    """

    embeds: torch.Tensor
    deepstack: tuple[torch.Tensor, ...] = ()

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.embeds, *self.deepstack))

    def part(self, start: int, stop: int) -> Features:
        """The features of the image's tokens from `start` up to `stop`."""
        return Features(self.embeds[start:stop], tuple(layer[start:stop] for layer in self.deepstack))


class SeenImages:
    """The images of one model. `most_bytes`: the size of the LRU cache of features."""

    def __init__(self, model: Any, processor: VisionProcessor, vocab_size: int, most_bytes: int) -> None:
        self._model, self._processor, self._most_bytes = model, processor, most_bytes
        self._merged = int(model.config.vision_config.spatial_merge_size) ** 2
        self._tokens = itertools.count(vocab_size)
        self._known: OrderedDict[SeenName, SeenImage] = OrderedDict()
        self._prepared: OrderedDict[int, Mapping[str, torch.Tensor]] = OrderedDict()
        self._prepared_bytes = 0
        self._features: OrderedDict[int, Features] = OrderedDict()
        self._features_bytes = 0
        self._epoch = 0
        self._lock = threading.Lock()

    def needs(self, name: SeenName) -> bool:
        """True if `know` will read the image. Call it on the event loop."""
        seen = self._known.get(name)
        return seen is None or not self._has(seen)

    def know(self, name: SeenName, source: Source) -> SeenImage:
        """Return the image, with its tensors prepared if its features are likely to be needed. CPU-heavy.

        Callable from worker threads. Raises InvalidRequest for an image that cannot be decoded.
        """
        with self._lock:
            seen = self._known.get(name)
            if seen is not None:
                self._known.move_to_end(name)
                if self._has(seen):
                    return seen
        tensors = self._tensors(source(), name.detail)
        with self._lock:
            seen = self._known.get(name) or self._new(name, tensors)
            if not self._has(seen):
                self._prepare(seen.token, tensors)
        return seen

    def features(self, seen: SeenImage, source: Source) -> Features:
        """The features of an image for the current weights. Raises the errors of the model.

        Call it on the batching thread, or while that thread is parked.
        """
        found = self._features.get(seen.token)
        if found is None:
            with self._lock:
                tensors = self._prepared.pop(seen.token, None)
                self._prepared_bytes -= _bytes_of(tensors or {})
            found = self._compute(tensors or self._tensors(source(), seen.name.detail))
            self._keep(seen.token, found)
        self._features.move_to_end(seen.token)
        seen.epoch = self._epoch
        return found

    def no_features(self, seen: SeenImage) -> Features:
        """Zeros in place of features that could not be computed.

        No other request may use their keys and values, so the image gets another id the next time.
        """
        import torch

        with self._lock:
            if self._known.get(seen.name) is seen:
                del self._known[seen.name]
        config = self._model.config
        layers = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
        width = config.get_text_config().hidden_size
        zeros = torch.zeros((seen.length, width), dtype=self._model.dtype, device=self._model.device)
        return Features(zeros, (zeros,) * layers)

    def emptied(self) -> None:
        """Note that the KV cache was emptied: images will need their features again."""
        self._epoch += 1

    def forget(self) -> None:
        """Drop all features, when weights change or memory is released. The batching thread must be parked."""
        self._features.clear()
        self._features_bytes = 0

    @property
    def held_bytes(self) -> int:
        """The size of the cached features in bytes."""
        return self._features_bytes

    def _tensors(self, file: ImageFile, detail: str) -> Mapping[str, torch.Tensor]:
        return self._processor.inputs([(decode_image(file.data), detail)])

    def _new(self, name: SeenName, tensors: Mapping[str, torch.Tensor]) -> SeenImage:
        time, height, width = tensors["image_grid_thw"][0].tolist()
        grid = (time, height, width)
        seen = self._known[name] = SeenImage(name, next(self._tokens), grid, time * height * width // self._merged)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return seen

    def _has(self, seen: SeenImage) -> bool:
        """True if nothing must be prepared: the features, pixel tensors, or keys and values exist, unless evicted."""
        return seen.epoch == self._epoch or seen.token in self._features or seen.token in self._prepared

    def _prepare(self, token: int, tensors: Mapping[str, torch.Tensor]) -> None:
        self._prepared[token] = tensors
        self._prepared_bytes += _bytes_of(tensors)
        while self._prepared_bytes > _MOST_PREPARED_BYTES and len(self._prepared) > 1:
            self._prepared_bytes -= _bytes_of(self._prepared.popitem(last=False)[1])

    def _compute(self, tensors: Mapping[str, torch.Tensor]) -> Features:
        device = self._model.device
        placed = {name: tensor.to(device) for name, tensor in tensors.items()}
        made = self._model.get_image_features(**placed, return_dict=True)
        deepstack = getattr(made, "deepstack_features", None) or ()
        return Features(made.pooler_output[0], tuple(layer[0] for layer in deepstack))

    def _keep(self, token: int, features: Features) -> None:
        self._features[token] = features
        self._features_bytes += features.bytes
        while self._features_bytes > self._most_bytes and len(self._features) > 1:
            self._features_bytes -= self._features.popitem(last=False)[1].bytes


def _bytes_of(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
