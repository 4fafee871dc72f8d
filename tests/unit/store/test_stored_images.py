"""Images of turns: committed with them, stored once a database, and deleted with the last session that has them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest

from proxy.errors import SessionNotFound
from proxy.store.store import Store
from proxy.types import ImageFile, ImagePart, Interaction, PlacedImage, SessionRecord
from tests.databases import execute

Build = Callable[..., Interaction]


def image(data: bytes, **fields: str) -> ImageFile:
    """An image file; the store does not look into its bytes."""
    return ImageFile(hashlib.sha256(data).hexdigest(), "image/png", 20, 10, data, **fields)


CAT, DOG = image(b"cat" * 1000, pixels="p1"), image(b"dog", url="http://pets.example/dog.png")


def part(file: ImageFile) -> ImagePart:
    return ImagePart(file.digest, 0, file.width, file.height)


def placed(*files: ImageFile) -> tuple[PlacedImage, ...]:
    return tuple(PlacedImage(file.digest, at, 1, file.width, file.height) for at, file in enumerate(files))


async def add(store: Store, turn: Interaction, *files: ImageFile) -> None:
    turn.images = placed(*files)
    await store.turns.append(turn, None, files)


async def sessions(store: Store, *names: str) -> None:
    for name in names:
        await store.starts.create_session(SessionRecord(name))


def stored(url: str) -> set[str]:
    return {row[0] for row in execute(url, "SELECT digest FROM images")}


async def test_the_images_of_a_turn_are_committed_with_it(store: Store, session: SessionRecord, node: Build) -> None:
    await add(store, node("a"), CAT, DOG)
    [turn] = await store.recordings.load_interactions("task-0")
    assert turn.images == placed(CAT, DOG)
    assert sorted(await store.images.read([DOG.digest, "0" * 64, CAT.digest])) == sorted([CAT, DOG._replace(url=None)])
    assert await store.images.find("task-0", CAT.digest) == CAT
    assert await store.images.pixels([CAT.digest, DOG.digest]) == {CAT.digest: "p1"}
    parts = await store.news.load_images("task-0")
    assert sorted(parts) == sorted([(part(CAT), 3000, None), (part(DOG), 3, DOG.url)])


async def test_equal_bytes_are_stored_once_and_each_session_has_its_own(
    store: Store, database_url: str, node: Build
) -> None:
    await sessions(store, "task-0", "other")
    turns = [node("a"), node("b"), node("c", session_id="other")]
    await asyncio.gather(*(add(store, turn, CAT) for turn in turns))
    assert execute(database_url, "SELECT digest, size FROM images") == [(CAT.digest, 3000)]
    assert len(execute(database_url, "SELECT 1 FROM session_images")) == 2
    assert await store.images.find("other", DOG.digest) is None


async def test_a_turn_that_is_refused_leaves_no_image(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    with pytest.raises(SessionNotFound):
        await add(store, node("a", session_id="nobody"), CAT)
    assert stored(database_url) == set()


async def test_an_image_goes_with_the_last_session_that_has_it(store: Store, database_url: str, node: Build) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"), CAT, DOG)
    await add(store, node("b", session_id="other"), CAT)
    await store.changes.delete_session("task-0")
    assert stored(database_url) == {CAT.digest}
    await store.changes.delete_session("other")
    assert stored(database_url) == set()
    assert execute(database_url, "SELECT 1 FROM session_images") == []


def test_the_repr_of_an_image_has_neither_its_bytes_nor_its_url() -> None:
    for file in (CAT, DOG):
        assert str(file.data) not in repr(file) and "example" not in repr(file)
        assert file.digest in repr(file)
