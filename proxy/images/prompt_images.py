"""The images of one prompt, for an engine: the places of their tokens, and their bytes, which are read when needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from proxy.images.image_pool import ImagePool
from proxy.types import ImageFile, PlacedImage


class PromptImages:
    """`placed`: in the order of the prompt. `files`: images whose bytes came with the request, by digest."""

    __slots__ = ("_files", "_pool", "placed")

    def __init__(self, placed: tuple[PlacedImage, ...], pool: ImagePool, files: Mapping[str, ImageFile]) -> None:
        self.placed, self._pool, self._files = placed, pool, files

    async def read(self, some: Sequence[PlacedImage] | None = None) -> list[ImageFile]:
        """Return the images, one for each of `placed`, or of `some` of them. Raises InvalidRequest for an image that
        does not exist."""
        wanted = self.placed if some is None else some
        missing = [image.digest for image in wanted if image.digest not in self._files]
        read = {file.digest: file for file in await self._pool.get(missing)} if missing else {}
        return [self._files.get(image.digest) or read[image.digest] for image in wanted]
