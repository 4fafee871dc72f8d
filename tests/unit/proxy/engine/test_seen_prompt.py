"""Prompts with images as the batch gets them: which images share keys and values, and which positions tokens have."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from proxy.engine.transformers.seen_images import SeenImage, SeenImages, SeenName, Source
from proxy.engine.transformers.seen_prompt import Placeholders, SeenPrompt, see
from proxy.types import ImageFile, PlacedImage, ids_of
from proxy.vision.positions import Positions
from tokengrove.errors import InvalidRequest

pytest.importorskip("numpy")
PAD, VIDEO, VOCABULARY = 90, 91, 100
PLACEHOLDERS = Placeholders(PAD, (PAD, VIDEO))
RULE = Positions(None)


class Known:
    """Gives each name an id above the vocabulary, and each image two tokens."""

    def __init__(self) -> None:
        self._tokens = itertools.count(VOCABULARY)
        self._known: dict[SeenName, SeenImage] = {}

    def know(self, name: SeenName, source: Source) -> SeenImage:
        if name not in self._known:
            self._known[name] = SeenImage(name, next(self._tokens), (1, 2, 4), 2)
        return self._known[name]


def unread() -> ImageFile:
    raise AssertionError


def seen(*images: tuple[str, str], ids: list[int] | None = None, length: int = 2) -> SeenPrompt:
    """A prompt of images between single tokens; each is a digest and a detail."""
    written = ids or [1, *itertools.chain.from_iterable([PAD] * length + [1] for _ in images)]
    placed = [PlacedImage(digest, 1 + 3 * at, length, 56, 28, detail) for at, (digest, detail) in enumerate(images)]
    known = cast(Any, Known())
    return see(cast(SeenImages, known), RULE, PLACEHOLDERS, ids_of(written), placed, [unread] * len(placed))


def test_an_image_shares_keys_and_values_with_itself_in_the_same_detail_only() -> None:
    prompt = seen(("a", ""), ("a", "low"), ("b", ""), ("a", ""))
    first, low, other, again = (prompt.ids[at : at + 2].tolist() for at in (1, 4, 7, 10))
    assert first == again
    assert len({*first, *low, *other}) == 3
    assert min(*first, *low, *other) >= VOCABULARY
    assert [each for each in prompt.ids if each < VOCABULARY] == [1] * 5


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([1, PAD, PAD, 1, PAD], "has 3 image placeholders .* take 2"),
        ([1, PAD, 1, PAD], "takes 2 tokens in this model; the prompt has 1"),
        ([1, PAD, PAD, VIDEO], f"the placeholder {VIDEO} of a video or a sound"),
    ],
)
def test_placeholders_that_stand_for_no_image_of_the_prompt_are_refused(ids: list[int], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        seen(("a", ""), ids=ids)


def test_an_image_with_another_number_of_tokens_than_its_features_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="takes 2 tokens in this model; the prompt has 3"):
        seen(("a", ""), ids=[1, PAD, PAD, PAD, 1], length=3)


def test_the_parts_of_images_between_two_tokens_are_told_by_their_own_tokens() -> None:
    prompt = seen(("a", ""), ("b", ""))
    assert prompt.images[1].start == 4
    parts = [(at.image.name.digest, start, stop) for at, start, stop in prompt.between(2, 3)]
    assert parts == [("a", 1, 2), ("b", 0, 1)]
    assert not [*prompt.between(6, 9)]
