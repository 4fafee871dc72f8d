"""Images by digest, for all sessions of this process: in memory while there is room, else read from the store.

Equal bytes are held once. What was dropped from memory is read again, so nobody may rely on the memory alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from proxy.errors import InvalidRequest
from proxy.types import ImageFile

ReadImages = Callable[[Sequence[str]], Awaitable[Sequence[ImageFile]]]
"""Reads stored images by digest; those that are not stored are left out."""


class ImagePool:
    """Holds at most `most_bytes` of images that were used last. `read`: reads what is not held."""

    def __init__(self, read: ReadImages, most_bytes: int) -> None:
        self._read, self._most_bytes = read, most_bytes
        self._held: OrderedDict[str, ImageFile] = OrderedDict()
        self._bytes = 0

    def put(self, files: Iterable[ImageFile]) -> None:
        """Hold these images, and drop those that were used longest ago."""
        for file in files:
            if file.digest not in self._held:
                self._held[file.digest] = file
                self._bytes += len(file.data)
            self._held.move_to_end(file.digest)
        while self._bytes > self._most_bytes and self._held:
            self._bytes -= len(self._held.popitem(last=False)[1].data)

    async def get(self, digests: Sequence[str]) -> list[ImageFile]:
        """Return the images in the order of `digests`. Raises InvalidRequest for one that is nowhere."""
        found = {digest: self._held[digest] for digest in digests if digest in self._held}
        missing = [digest for digest in dict.fromkeys(digests) if digest not in found]
        if missing:
            read = await self._read(missing)
            found.update((file.digest, file) for file in read)
            self.put(read)
        lost = next((digest for digest in digests if digest not in found), None)
        if lost is not None:
            raise InvalidRequest(f"the image {lost} is not stored; send it again", param="messages")
        return [found[digest] for digest in digests]
