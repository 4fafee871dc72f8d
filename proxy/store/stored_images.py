"""Reads of stored images. They are written with the turn that brought them (`TurnLog.append`)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from proxy.store.recordings import Readable
from proxy.store.sql import images
from proxy.types import ImageFile


class StoredImages:
    """Images by digest. Each is stored once, for all sessions that have it."""

    def __init__(self, database: Readable) -> None:
        self._database = database

    async def read(self, digests: Sequence[str]) -> list[ImageFile]:
        """Return the images that are stored, in any order."""
        return await self._database.read(images.load_images, digests)

    async def find(self, session_id: str, digest: str) -> ImageFile | None:
        """Return an image of a session; None if the session has none of this digest."""
        return await self._database.read(images.find_image, session_id, digest)

    async def pixels(self, digests: Collection[str]) -> dict[str, str]:
        """Return the pixel digests of stored images by image digest; unknown ones are omitted."""
        return await self._database.read(images.load_pixels, digests)
