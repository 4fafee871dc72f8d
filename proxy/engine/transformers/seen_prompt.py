"""A prompt with images for the batch: ids that distinguish images, positions, and the places of features."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from proxy.engine.transformers.seen_images import SeenImage, SeenImages, SeenName, Source
from proxy.types import Ids, PlacedImage, ids_of
from proxy.vision.positions import Positions
from tokengrove.errors import InvalidRequest

if TYPE_CHECKING:
    import numpy as np


class Placeholders(NamedTuple):
    """The placeholder ids of images, videos and sounds, which are never sampled. `image`: the placeholder of images."""

    image: int
    all: tuple[int, ...]


class PlacedSight(NamedTuple):
    """An image of a prompt. `start`: its first token. `source`: its bytes, for features that must be recomputed."""

    start: int
    image: SeenImage
    source: Source


@dataclass(frozen=True, slots=True, eq=False)
class SeenPrompt:
    """A prompt with images for the batch.

    `ids`: the prompt with each placeholder replaced by the id of its image. `positions`: int64 [3, tokens + 1],
    including the first token after the prompt; None for a model with plain positions. `images`: the images in order.
    """

    ids: Ids
    positions: np.ndarray[Any, Any] | None
    images: tuple[PlacedSight, ...]

    def positions_from(self, first: int, count: int) -> np.ndarray[Any, Any]:
        """The positions [3, count] of the tokens from `first` on, which may include sampled tokens after the prompt."""
        import numpy as np

        assert self.positions is not None
        known = len(self.ids)
        if first + count <= known:
            return self.positions[:, first : first + count]
        later = np.arange(max(first, known), first + count) + (self.positions[0, known] - known)
        return np.concatenate([self.positions[:, first:known], np.broadcast_to(later, (3, len(later)))], axis=1)

    def between(self, first: int, count: int) -> Iterator[tuple[PlacedSight, int, int]]:
        """Yield the images with tokens among the `count` tokens from `first` on, each with its part: start and stop."""
        last = self.images[-1]
        if first >= last.start + last.image.length:  # the case of each sampled token
            return
        for placed in self.images:
            start, stop = max(placed.start, first), min(placed.start + placed.image.length, first + count)
            if start < stop:
                yield placed, start - placed.start, stop - placed.start


def see(
    images: SeenImages,
    rule: Positions,
    placeholders: Placeholders,
    ids: Ids,
    placed: Sequence[PlacedImage],
    sources: Sequence[Source],
) -> SeenPrompt:
    """Return the prompt `ids` for the batch. CPU-heavy, since it decodes new images.

    Raises InvalidRequest if an image does not have as many placeholders as features.
    """
    sights = tuple(
        PlacedSight(at.start, images.know(SeenName(at.digest, at.detail), source), source)
        for at, source in zip(placed, sources, strict=True)
    )
    shown = _array(ids) == placeholders.image
    for place, (at, sight) in enumerate(zip(placed, sights, strict=True)):
        features, found = sight.image.length, int(shown[at.start : at.start + at.length].sum())
        if not features == found == at.length:
            raise InvalidRequest(
                f"image {place} of the prompt takes {features} tokens in this model; the prompt has {found} "
                f"placeholders among the {at.length} tokens that it says are the image",
                param="input_ids",
            )
    check_placeholders(ids, placeholders, sum(at.length for at in placed))
    unique = ids[:]
    for sight in sights:
        unique[sight.start : sight.start + sight.image.length] = ids_of([sight.image.token]) * sight.image.length
    spans = [(sight.start, sight.image.length) for sight in sights]
    return SeenPrompt(unique, rule.of(spans, [sight.image.grid for sight in sights], len(ids) + 1), sights)


def check_placeholders(ids: Ids, placeholders: Placeholders, expected: int) -> None:
    """Raise InvalidRequest unless `ids` has `expected` placeholders of images, and no other placeholders."""
    array = _array(ids)
    found = int((array == placeholders.image).sum())
    if found != expected:
        raise InvalidRequest(
            f"input_ids has {found} image placeholders (id {placeholders.image}); the images of the request take "
            f"{expected}",
            param="input_ids",
        )
    for other in placeholders.all:
        if other != placeholders.image and bool((array == other).any()):
            raise InvalidRequest(
                f"input_ids has the placeholder {other} of a video or a sound; this engine shows images only",
                param="input_ids",
            )


def _array(ids: Ids) -> np.ndarray[Any, Any]:
    """The ids as a numpy array without a copy: a prompt with 200 screenshots has 300,000 ids."""
    import numpy as np

    return np.frombuffer(ids, dtype=np.int32)
