"""A prompt with images as the batch gets it: ids that tell images apart, positions, and where features stand."""

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
    """Ids that stand for images, videos and sounds in a prompt, and are never sampled. `image`: that of images."""

    image: int
    all: tuple[int, ...]


class PlacedSight(NamedTuple):
    """An image of a prompt: its tokens begin at `start`. `source`: its bytes, for features that must be made anew."""

    start: int
    image: SeenImage
    source: Source


@dataclass(frozen=True, slots=True, eq=False)
class SeenPrompt:
    """`ids`: the prompt with the id of its image for each placeholder. `positions`: int64 [3, tokens + 1], of the first
    token after the prompt too; None for a model that counts tokens. `images`: in order.
    """

    ids: Ids
    positions: np.ndarray[Any, Any] | None
    images: tuple[PlacedSight, ...]

    def positions_from(self, first: int, count: int) -> np.ndarray[Any, Any]:
        """The positions [3, count] of the tokens from `first` on, which may be sampled ones after the prompt."""
        import numpy as np

        assert self.positions is not None
        known = len(self.ids)
        if first + count <= known:
            return self.positions[:, first : first + count]
        later = np.arange(max(first, known), first + count) + (self.positions[0, known] - known)
        return np.concatenate([self.positions[:, first:known], np.broadcast_to(later, (3, len(later)))], axis=1)

    def between(self, first: int, count: int) -> Iterator[tuple[PlacedSight, int, int]]:
        """The images with tokens among `count` from `first` on, each with the part of it that is: from, up to."""
        last = self.images[-1]
        if first >= last.start + last.image.length:  # as for each sampled token
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
    """Return the prompt `ids` as the batch gets it. CPU-heavy: it decodes new images.

    Raises InvalidRequest if the placeholders are not as many as the features of the images that they stand for.
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
    """Raise InvalidRequest unless `ids` has `expected` placeholders of images, and none of others."""
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
    """The same ids for numpy: a prompt of 200 screenshots has 300,000."""
    import numpy as np

    return np.frombuffer(ids, dtype=np.int32)
