"""The pool holds the images that were used last, within its bytes, and reads others once for all who want them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from proxy.images.image_pool import ImagePool
from proxy.types import ImageFile
from tokengrove.errors import InvalidRequest, StoreUnavailable


def image(name: str, size: int = 10) -> ImageFile:
    return ImageFile(name, "image/png", 1, 1, bytes(size))


A, B, C = image("a"), image("b"), image("c")


class Stored:
    """A store of images that notes what is read of it. Reads wait for `gate`."""

    def __init__(self, *files: ImageFile) -> None:
        self._files = {file.digest: file for file in files}
        self.reads: list[list[str]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.fails = False

    async def read(self, digests: Sequence[str]) -> list[ImageFile]:
        self.reads.append(list(digests))
        await self.gate.wait()
        if self.fails:
            raise StoreUnavailable("down")
        return [self._files[digest] for digest in digests if digest in self._files]


async def test_images_come_in_the_order_in_which_they_are_asked_for_and_as_often() -> None:
    stored = Stored(A, B)
    pool = ImagePool(stored.read, 100)
    pool.put([C])
    assert await pool.get(["b", "c", "a", "b"]) == [B, C, A, B]
    assert await pool.get(["a", "b"]) == [A, B]
    assert stored.reads == [["b", "a"]]


async def test_what_was_used_longest_ago_is_dropped_and_read_again() -> None:
    stored = Stored(A, B, C)
    pool = ImagePool(stored.read, 25)
    pool.put([A, B])
    await pool.get(["a"])
    pool.put([C])
    assert pool.held_bytes == 20
    await pool.get(["a", "c"])
    assert stored.reads == []
    assert await pool.get(["b"]) == [B]
    assert stored.reads == [["b"]]


async def test_an_image_that_is_larger_than_the_pool_is_given_and_not_held() -> None:
    large = image("large", 1000)
    pool = ImagePool(Stored(large).read, 100)
    assert await pool.get(["large"]) == [large]
    assert pool.held_bytes == 0


async def test_an_image_that_is_nowhere_is_named() -> None:
    with pytest.raises(InvalidRequest, match="the image x is not stored; send it again"):
        await ImagePool(Stored(A).read, 100).get(["a", "x"])


async def test_readers_at_once_share_a_read_even_if_the_first_of_them_goes_away() -> None:
    stored = Stored(A, B, C)
    stored.gate.clear()
    pool = ImagePool(stored.read, 100)
    first = asyncio.create_task(pool.get(["a", "b"]))
    await asyncio.sleep(0)
    rest = [asyncio.create_task(pool.get(["b", "c"])), asyncio.create_task(pool.get(["c", "a"]))]
    await asyncio.sleep(0)
    first.cancel()
    stored.gate.set()
    assert await asyncio.gather(*rest) == [[B, C], [C, A]]
    assert stored.reads == [["a", "b"], ["c"]]


async def test_a_read_that_fails_fails_for_its_readers_and_not_for_later_ones() -> None:
    stored = Stored(A)
    stored.fails = True
    pool = ImagePool(stored.read, 100)
    failed = await asyncio.gather(pool.get(["a"]), pool.get(["a"]), return_exceptions=True)
    assert [type(each) for each in failed] == [StoreUnavailable] * 2
    stored.fails = False
    assert await pool.get(["a"]) == [A]
