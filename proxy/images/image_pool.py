"""Images by digest, for all sessions of this process: in memory while there is room, else read from the store.

Equal bytes are held once, and read once for all that need them at the same time. Images that were dropped from memory
are read again, so callers cannot rely on the memory alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from proxy.types import ImageFile
from tokengrove.errors import InvalidRequest

ReadImages = Callable[[Sequence[str]], Awaitable[Sequence[ImageFile]]]
"""Reads stored images by digest. Images that are not stored are left out."""
_Found = dict[str, ImageFile]


class ImagePool:
    """Holds the most recently used images, at most `most_bytes`. `read`: reads images that are not held."""

    def __init__(self, read: ReadImages, most_bytes: int) -> None:
        self._read, self._most_bytes = read, most_bytes
        self._held: OrderedDict[str, ImageFile] = OrderedDict()
        self._bytes = 0
        self._reading: dict[str, asyncio.Task[_Found]] = {}

    @property
    def held_bytes(self) -> int:
        """The number of bytes of images in memory."""
        return self._bytes

    def put(self, files: Iterable[ImageFile]) -> None:
        """Hold these images, and drop the least recently used."""
        for file in files:
            if file.digest not in self._held:
                self._held[file.digest] = file
                self._bytes += len(file.data)
            self._held.move_to_end(file.digest)
        while self._bytes > self._most_bytes and self._held:
            self._bytes -= len(self._held.popitem(last=False)[1].data)

    async def get(self, digests: Sequence[str]) -> list[ImageFile]:
        """Return the images in the order of `digests`. Raises InvalidRequest for an image that does not exist."""
        found = {digest: self._held[digest] for digest in digests if digest in self._held}
        for digest in found:
            self._held.move_to_end(digest)
        missing = [digest for digest in dict.fromkeys(digests) if digest not in found]
        if missing:
            found |= await self._load(missing)
        lost = next((digest for digest in digests if digest not in found), None)
        if lost is not None:
            raise InvalidRequest(f"the image {lost} is not stored; send it again", param="messages")
        return [found[digest] for digest in digests]

    async def _load(self, missing: Sequence[str]) -> _Found:
        """Read images, or wait if they are being read. Images that are not stored are left out."""
        new = [digest for digest in missing if digest not in self._reading]
        if new:
            task = asyncio.create_task(self._take(new))
            task.add_done_callback(_retrieved)
            self._reading.update(dict.fromkeys(new, task))
        found: _Found = {}
        for task in {self._reading[digest]: None for digest in missing}:
            found |= await asyncio.shield(task)  # others may also wait for it
        return found

    async def _take(self, digests: Sequence[str]) -> _Found:
        try:
            files = await self._read(digests)
        finally:
            for digest in digests:
                del self._reading[digest]
        self.put(files)
        return {file.digest: file for file in files}


def _retrieved(task: asyncio.Task[_Found]) -> None:
    """Retrieve the error of a read: asyncio would report an error that nobody waits for."""
    if not task.cancelled():
        task.exception()
