"""Request bodies: read within the limits of one body and of all bodies together, and decoded if they are not too large.

No body may delay other clients. A large body is weighed before it is parsed, because orjson holds the interpreter lock.
The Python work on it runs in a worker thread, where senders take turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from proxy.api.addresses import Addresses
from proxy.api.body_budget import FREE, BodyBudget, Share
from proxy.api.headers import Headers, headers_of
from proxy.api.http import as_object, decode_json
from proxy.images.intake import ImageIntake, NoSession
from proxy.images.lifting import Lifted
from proxy.protocols.image_sources import Source, image_sources
from proxy.resources.fair_pool import FairPool
from proxy.resources.memory import FreedMemory
from proxy.resources.senders import Sender, Senders
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.types import Api, ImageFile
from tokengrove.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

_T = TypeVar("_T")

INLINE = 512 * 1024
"""A body of at most this many bytes is decoded on the event loop: whatever it contains, that takes at most 20 ms."""

INLINE_WORK = 128 * 1024
"""The Python work on a body of at most this many bytes also runs there."""

_JSON = "application/json"
_FEW_DIGITS = 10
# More threads would only wait for each other: they need the interpreter lock nearly all the time.
_THREADS = 2
# The memory of a larger body is returned to the system after its release.
_LARGE = 2**20


class Bodies:
    """The bodies of all requests to one server process."""

    def __init__(
        self,
        settings: Settings,
        freed: FreedMemory,
        images: ImageIntake | None = None,
        addresses: Addresses | None = None,
        senders: Senders | None = None,
    ) -> None:
        """`images`: reads the images of bodies; None without a vision model."""
        self.freed, self.images = freed, images
        self.addresses, senders = addresses or Addresses(settings), senders or Senders()
        self.pool = FairPool(_THREADS, freed, senders.work)
        self.most = settings.max_body_bytes
        self._most_values = settings.max_body_values
        self.budget = BodyBudget(settings.all_body_bytes, senders.body_bytes)

    def upload(self, scope: Scope, headers: Headers, receive: Receive) -> Upload:
        """The body of a request. Use it in a `with` block that ends when the body and its parsed values are used."""
        return Upload(self, scope, headers, receive)

    async def read_object(self, request: Request) -> Mapping[str, Any]:
        """Read a JSON object; an empty body is an empty object. Raises InvalidRequest for anything else."""
        with self.upload(request.scope, headers_of(request.scope), request.receive) as upload:
            return await upload.decode_object(await upload.read())

    def decode(self, body: bytes) -> Any:
        """Decode JSON. Raises InvalidRequest with the position of the error, or if the body has too many values."""
        most = self._most_values
        if weighs_at_most(body) > most and weigh(body, most) > most:
            raise InvalidRequest(
                f"the body has more than {most} values (an array, an object or a key counts as "
                f"{CONTAINER}); send less in one request, or raise the limit with --max-body-values",
                param="body",
            )
        return decode_json(body)

    def decode_without_images(self, body: bytes) -> tuple[Any, Lifted]:
        """Decode JSON like `decode`, with marks in place of images, which count as no values and take no time."""
        lifted = Lifted(body)
        try:
            return self.decode(lifted.json), lifted
        except InvalidRequest:
            if lifted:
                decode_json(body)  # for an error with the position in the original body
            raise


class Upload:
    """The body of one request. The end of the `with` block releases its share of the budget."""

    __slots__ = ("_bodies", "_headers", "_lifted", "_receive", "_scope", "_sender", "_share")

    def __init__(self, bodies: Bodies, scope: Scope, headers: Headers, receive: Receive) -> None:
        self._bodies, self._scope, self._headers, self._receive = bodies, scope, headers, receive
        self._share: Share | None = None
        self._sender: Sender | None = None
        self._lifted: tuple[bytes, Lifted] | None = None

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        if self._share is not None:
            self.release()

    @property
    def counted(self) -> bool:
        """Whether it has a share of the budget."""
        return self._share is not None

    @property
    def sender(self) -> Sender:
        """The sender, as far as it is known before the body is read."""
        if self._sender is None:
            self._sender = self._bodies.addresses.sender(self._scope, self._headers)
        return self._sender

    def release(self) -> None:
        """Release the share. May be called before the end of the block, when the body is no longer used."""
        if self._share is not None:
            if self._share.size > _LARGE:
                self._bodies.freed.expect()
            self._bodies.budget.release(self._share)
            self._share = None

    def handed_on(self) -> Upload:
        """The same body for another `with` block, which then releases the share instead of this one."""
        other = Upload(self._bodies, self._scope, self._headers, self._receive)
        other._share, self._share = self._share, None
        return other

    async def read(self) -> bytes:
        """Read the whole body, which must be declared as JSON unless it is empty.

        Raises UnsupportedMediaType, BodyTooLarge as soon as the body is known to exceed the limit, TooManyRequests if
        other bodies leave no room for it, or ClientDisconnect.
        """
        most = self._bodies.most
        told = self._headers.get(b"content-length", "")
        length = int(told) if told.isdecimal() and len(told) < _FEW_DIGITS else _declared(told, most)
        if length > most:
            raise _too_large(most)
        chunks: list[bytes] = []
        size = 0
        more = True
        while more:
            message = await (self._receive() if self._share is None else self._receive_or_give_up(self._share))
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            chunk = message.get("body", b"")
            if chunk and not size and (kind := self._headers.get(b"content-type", "")) != _JSON:
                _check_json(kind)
            size += len(chunk)
            if size > most:
                raise _too_large(most)
            chunks.append(chunk)
            more = message.get("more_body", False)
            if size > FREE and self._share is None:
                self._share = Share(self.sender, length)
                await self._bodies.budget.take(self._share)
        if self._share is not None:
            self._bodies.budget.arrived(self._share, size)
        return b"".join(chunks)

    async def decode(self, body: bytes) -> Any:
        """Decode JSON. Raises InvalidRequest with the position of the error, or if the body has too many values."""
        return decode_json(body) if len(body) <= INLINE else await self.do(len(body), self._bodies.decode, body)

    async def decode_turn(self, body: bytes) -> tuple[Any, int]:
        """Like `decode`, for a body whose images `read_images` reads next.

        Also returns the number of decoded bytes: the images of a large body are not decoded.
        """
        if self._bodies.images is None or len(body) <= INLINE:
            return await self.decode(body), len(body)
        value, lifted = await self.do(len(body), self._bodies.decode_without_images, body)
        if lifted:
            self._lifted = body, lifted
        return value, len(lifted.json)

    async def decode_turn_object(self, body: bytes) -> tuple[Mapping[str, Any], int]:
        """Like `decode_turn`, for a JSON object; an empty body is an empty object."""
        value, size = await self.decode_turn(body) if body.strip() else ({}, 0)
        return as_object(value), size

    async def decode_object(self, body: bytes) -> Mapping[str, Any]:
        """Decode a JSON object; an empty body is an empty object. Raises InvalidRequest for anything else."""
        return as_object(await self.decode(body) if body.strip() else {})

    async def do(self, size: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function on a body of `size` bytes: in a worker thread, fair by sender, if it may take long."""
        return function(*arguments) if size <= INLINE_WORK else await self.work(size, function, *arguments)

    async def work(self, size: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a function that may take long for a body of any size, in a worker thread, fair by sender."""
        return await self._bodies.pool.run(self.sender, size, function, *arguments)

    async def read_images(
        self, body: Any, size: int, api: Api, session: LiveSession | None, *, sizes_only: bool = False
    ) -> dict[str, ImageFile]:
        """Read the images of a decoded body, before it is parsed. `size`: the bytes of the body.

        `sizes_only`: the bytes of images with a known size are not needed. Returns the images that are not stored with
        the session, by digest. Raises InvalidRequest naming the field.
        """
        intake = self._bodies.images
        if intake is None:
            return {}
        sources = await self.do(size, image_sources, body, api)
        if self._lifted is not None:
            sources = await self._with_texts(sources, body, api, *self._lifted)
        if not sources:
            return {}
        holder = NoSession() if session is None else session
        return await intake.take(sources, holder, self.work, sizes_only=sizes_only)

    async def _with_texts(
        self, sources: list[Source], body: Any, api: Api, sent: bytes, lifted: Lifted
    ) -> list[Source]:
        """Return the sources with the texts that were lifted.

        If a lifted text is not an image, the whole body is decoded, because the mark may be part of any text.
        """
        self._lifted = None
        texts = [lifted.at(source.text) for source in sources if isinstance(source.text, str)]
        if len(texts) - texts.count(None) == len(lifted):
            pairs = zip(sources, texts, strict=True)
            return [source if text is None else source._replace(text=text) for source, text in pairs]
        if not isinstance(body, dict):
            return []
        whole = await self.do(len(sent), self._bodies.decode, sent)
        body.clear()
        body.update(whole)
        return await self.do(len(sent), image_sources, body, api)

    async def _receive_or_give_up(self, share: Share) -> Any:
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if share.was_given_up():
                raise self._bodies.budget.full() from None
            raise


def _declared(length: str, most: int) -> int:
    """The length of a body according to its header; `most` if it has none, `most + 1` for any larger number.

    `int` refuses numbers of more than 4300 digits.
    """
    if not length.isdecimal():
        return most
    digits = length.lstrip("0")
    return most + 1 if len(digits) > len(str(most)) else min(int(digits or "0"), most + 1)


def _check_json(content_type: str) -> None:
    """Raise UnsupportedMediaType unless the type is JSON.

    Browsers let pages of any site send forms and plain text without a preflight.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind != _JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        given = f"'content-type: {kind[:100]}'" if kind else "no content-type"
        raise UnsupportedMediaType(
            f"the body must be JSON, and this one came with {given}: send 'content-type: application/json' "
            "(with curl: -H 'content-type: application/json')"
        )


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body exceeds the limit of {limit} bytes; raise the limit with --max-body-bytes")


CONTAINER = 12
"""The weight of an array, an object or a key; a comma weighs 1.

Numbers, strings and words, which a comma stands for, take about 40 ns each; the others about twelve times as long.
"""

_SLICE = 256 * 1024
_QUOTE = ord('"')
_WEIGHTS = np.zeros(256, np.uint8)
_WEIGHTS[ord(",")] = 1
_WEIGHTS[[ord(mark) for mark in "[{:"]] = CONTAINER


def weighs_at_most(text: bytes) -> int:
    """Return an upper bound of the weight: marks in strings also count. Takes a quarter of the time of `weigh`."""
    return text.count(b",") + CONTAINER * (text.count(b"[") + text.count(b"{") + text.count(b":"))


def weigh(text: bytes, most: int) -> int:
    """Return the weight of a JSON text, or any number above `most` if it weighs more.

    For invalid JSON, it is at least the weight of the part that a parser reads before it stops.
    """
    weight, at = 0, 0
    within = np.False_  # a string
    while at < len(text) and weight <= most:
        part = text[at : at + _SLICE]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:  # the last one escapes the byte after this slice
            part = text[at : at + _SLICE + 1]
        at += len(part)
        if b"\\" in part:
            part = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        marks = np.frombuffer(part, np.uint8)
        if not marks.size:
            continue
        inside = np.logical_xor.accumulate(marks == _QUOTE) ^ within
        within = inside[-1]
        weight += int(_WEIGHTS[marks[~inside]].sum(dtype=np.int64))
    return weight
