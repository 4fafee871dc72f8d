"""The images of a request: read, checked and identified by digest before the request is parsed.

Agents send their whole history with every turn, so most images have been read before. Base64 text that this process has
seen is recognised by its hash: its image is neither decoded, opened nor hashed again. The bytes are returned only for
an image that is not yet stored with the session: an image known in memory is not necessarily stored.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

from xxhash import xxh3_128_digest

from proxy.images.data_urls import Text, decode_text, is_url
from proxy.images.decode import read_image
from proxy.types import ImageFile, ImagePart
from tokengrove.errors import InvalidRequest, UnsupportedParameter

Work = Callable[..., Awaitable[Any]]
"""`await work(size, function, *arguments)` calls a function in a thread. `size`: the bytes that it reads."""

_MOST_KNOWN = 50_000
_MOST_FETCHED = 64 * 2**20
# The number of URLs that a session remembers; images of earlier URLs are fetched again.
_MOST_URLS = 10_000
# Decoding base64 text of this length takes a fraction of a millisecond.
_INLINE = 64 * 1024


class Source(Protocol):
    """An image in a request: a data URL, base64 text or an http(s) URL in the field `name`."""

    @property
    def text(self) -> Text: ...

    @property
    def name(self) -> str: ...

    def put(self, image: ImagePart) -> None: ...


class Holder(Protocol):
    """The images of a session: those stored with it, and the digests of those that it fetched, by URL."""

    images: dict[str, ImagePart]
    image_urls: dict[str, str]


class Fetch(Protocol):
    """Fetches an image for a field of a request. Raises InvalidRequest naming the field."""

    async def __call__(self, url: str, name: str) -> bytes: ...


class Limits(NamedTuple):
    """The maximum pixels and bytes of an image, images of a request, and bytes that a request may fetch."""

    pixels: int
    bytes: int
    images: int
    fetched: int


class NoSession:
    """The holder of a request without a session."""

    def __init__(self) -> None:
        self.images: dict[str, ImagePart] = {}
        self.image_urls: dict[str, str] = {}


class ImageIntake:
    """Reads images for all sessions of a process. `refusal`: returns why all images are refused now; "" if they are
    accepted. `fetch`: None if URLs are refused."""

    def __init__(self, limits: Limits, refusal: Callable[[], str], fetch: Fetch | None = None) -> None:
        self._limits, self._refusal, self._fetch = limits, refusal, fetch
        self._known: OrderedDict[bytes, ImageFile] = OrderedDict()  # without their data
        self._seed = secrets.randbits(64)  # nobody can create two texts with the same hash
        # Fetched images that may not be stored yet: a retry must find the same image.
        self._fetched: OrderedDict[str, ImageFile] = OrderedDict()
        self._fetching: dict[tuple[int, str], asyncio.Task[ImageFile]] = {}

    async def take(
        self, sources: Sequence[Source], holder: Holder, work: Work, *, sizes_only: bool = False
    ) -> dict[str, ImageFile]:
        """Read the images of a request, and replace each with an `ImagePart`. Return the images that are not stored
        with the session, by digest.

        `holder`: the session. `work`: runs CPU-heavy functions off the event loop. `sizes_only`: images with known
        sizes may be left out of the result. Raises InvalidRequest naming the field of an image that is broken, too
        large or not available.
        """
        if why := self._refusal():
            raise UnsupportedParameter(f"'{sources[0].name}' is an image, and {why}", param=sources[0].name)
        self._check_number(sources)
        files: dict[str, ImageFile] = {}
        texts = [source for source in sources if not is_url(source.text)]
        length = sum(len(source.text) for source in texts)
        keys = await self._do(work, length, self._keys, [source.text for source in texts])
        parts: dict[bytes, ImagePart] = {}
        for key, source in zip(keys, texts, strict=True):
            if key not in parts:
                file = await self._of_text(key, source, holder, work, sizes_only)
                parts[key] = ImagePart(file.digest, 0, file.width, file.height)
                if file.data:
                    files[file.digest] = file
            source.put(parts[key])
        for source in sources:
            if is_url(source.text):
                source.put(await self._of_url(source, holder, work, files))
        return files

    def _check_number(self, sources: Sequence[Source]) -> None:
        most = self._limits.images
        if len(sources) > most:
            name = sources[most].name
            raise InvalidRequest(
                f"'{name}' is image {most + 1} of the request; at most {most} are allowed (--max-request-images)",
                param=name,
            )

    async def _do(self, work: Work, size: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function directly if its input is short, else in a thread."""
        return function(*arguments) if size <= _INLINE else await work(size, function, *arguments)

    def _keys(self, texts: Sequence[Text]) -> list[bytes]:
        return [
            xxh3_128_digest(text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text, seed=self._seed)
            for text in texts
        ]

    async def _of_text(self, key: bytes, source: Source, holder: Holder, work: Work, sizes_only: bool) -> ImageFile:
        """Return the image of a text, without its data if that is known and not needed."""
        text, name = source.text, source.name
        known = self._known.get(key)
        if known is None:
            file: ImageFile = await work(len(text), self._read_text, text, name)
            known = self._known[key] = file._replace(data=b"")
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
            if sizes_only or known.digest in holder.images:
                return known
            data = await self._do(work, len(text), decode_text, text, name, self._limits.bytes)
            file = known._replace(data=data)
        return known if known.digest in holder.images else file

    def _read_text(self, text: Text, name: str) -> ImageFile:
        return self._read(decode_text(text, name, self._limits.bytes), name)

    def _read(self, data: bytes, name: str) -> ImageFile:
        return read_image(data, name, most_pixels=self._limits.pixels, most_bytes=self._limits.bytes)

    async def _of_url(self, source: Source, holder: Holder, work: Work, files: dict[str, ImageFile]) -> ImagePart:
        """Return the image at a URL, which is fetched once per session."""
        url = str(source.text)
        if self._fetch is None:
            raise UnsupportedParameter(
                f"'{source.name}' is a URL, and this server fetches no images; send the image as a data URL, or start "
                "the server with --allow-image-urls",
                param=source.name,
            )
        digest = holder.image_urls.get(url, "")
        if (stored := holder.images.get(digest)) is not None:
            return stored
        if (known := self._fetched.get(digest)) is not None:
            file = known._replace(url=url)  # another session may have fetched it from another URL
        else:
            file = await self._fetched_once(source, holder, work)
        files[file.digest] = file
        if sum(len(file.data) for file in files.values()) > self._limits.fetched:
            raise InvalidRequest(
                f"the new images of the request have more than {self._limits.fetched} bytes (--max-body-bytes)",
                param=source.name,
            )
        return ImagePart(file.digest, 0, file.width, file.height)

    async def _fetched_once(self, source: Source, holder: Holder, work: Work) -> ImageFile:
        """Fetch an image, or wait for a request of the same session that fetches it. A failure affects all of them."""
        place = (id(holder), str(source.text))
        task = self._fetching.get(place)
        if task is None:
            task = self._fetching[place] = asyncio.create_task(self._fetch_one(source, holder, work))
            task.add_done_callback(partial(self._fetch_ended, place))
        return await asyncio.shield(task)

    def _fetch_ended(self, place: tuple[int, str], task: asyncio.Task[ImageFile]) -> None:
        del self._fetching[place]
        if not task.cancelled():
            task.exception()  # asyncio would report an error that nobody waits for

    async def _fetch_one(self, source: Source, holder: Holder, work: Work) -> ImageFile:
        assert self._fetch is not None
        url = str(source.text)
        data = await self._fetch(url, source.name)
        read: ImageFile = await work(len(data), self._read, data, source.name)
        file = read._replace(url=url)
        holder.image_urls[url] = file.digest
        if len(holder.image_urls) > _MOST_URLS:
            del holder.image_urls[next(iter(holder.image_urls))]
        self._fetched[file.digest] = file
        while sum(len(file.data) for file in self._fetched.values()) > _MOST_FETCHED:
            self._fetched.popitem(last=False)
        return file
