"""Asks an external model: one request, one streamed answer, over connections of its own.

Nothing is sent but the request and the operator's key: no cookies, no other credentials, and neither proxies nor
redirects are followed. An answer is bounded in bytes, and its silence in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

import orjson

from proxy.images.image_pool import ReadImages
from proxy.models.declared import Upstream
from proxy.rendering.deltas import Delta
from proxy.telemetry.log_lines import without_texts
from proxy.types import ImageFile, SamplingParams, TurnRequest
from proxy.upstream.answer import AnswerParts, UpstreamAnswer
from proxy.upstream.chat_reader import ChatReader
from proxy.upstream.events import Event, EventDecoder, json_of
from proxy.upstream.failure import LATE, Failure, message_of, refused
from proxy.upstream.messages_reader import MessagesReader
from proxy.upstream.request_body import upstream_body, with_images
from proxy.upstream.responses_reader import ResponsesReader
from tokengrove.errors import ConfigurationError, InvalidRequest, UpstreamFailed, short
from tokengrove.options.model import UpstreamApi

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

MOST_BYTES = 64 * 1024 * 1024
"""The most bytes of an answer."""

_MOST_OF_ERROR = 64 * 1024
_CONNECT_S = 10.0
_KEPT_S = 4.0
"""Seconds for which an idle connection can be reused. Many servers close it after 5 s."""

_REST_S = 1.0
"""Seconds for which the end of a connection's answer is read after the last event, so that it can be kept alive."""

_OK = 200
_VERSION = {"anthropic-version": "2023-06-01"}
_PATHS = {
    UpstreamApi.CHAT: "/chat/completions",
    UpstreamApi.RESPONSES: "/responses",
    UpstreamApi.MESSAGES: "/messages",
}


class _Reader(Protocol):
    """Reads the answers of one API."""

    def read(self, event: Event) -> bool: ...

    def whole(self, answer: dict[str, Any]) -> None: ...

    def end(self) -> UpstreamAnswer: ...


_READERS: dict[UpstreamApi, Callable[[AnswerParts], _Reader]] = {
    UpstreamApi.CHAT: ChatReader,
    UpstreamApi.RESPONSES: ResponsesReader,
    UpstreamApi.MESSAGES: MessagesReader,
}


class UpstreamClient:
    """Sends requests to one external model. Raises ConfigurationError if its URL or its key cannot be sent."""

    def __init__(self, upstream: Upstream) -> None:
        import httpx

        self._upstream = upstream
        self._url = upstream.url + _PATHS[upstream.api]
        try:
            httpx.URL(self._url)
        except httpx.InvalidURL as error:
            raise ConfigurationError(f"the URL of the external model {upstream.model!r} is invalid: {error}") from None
        self._headers = {
            "content-type": "application/json",
            "accept": "text/event-stream, application/json",
            "accept-encoding": "identity",
            "user-agent": "tokengrove",
            **_key_header(upstream),
        }
        parts = urlsplit(upstream.url)
        secrets = {upstream.key, upstream.url, parts.netloc, parts.hostname} - {None, ""}
        self._secrets = re.compile("|".join(map(re.escape, sorted(map(str, secrets), key=len, reverse=True))), re.I)
        self._client = httpx.AsyncClient(
            verify=ssl.create_default_context() if parts.scheme == "https" else False,
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(upstream.timeout_s, connect=min(_CONNECT_S, upstream.timeout_s), pool=None),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=100, keepalive_expiry=_KEPT_S),
        )

    def body(self, request: TurnRequest, sampling: SamplingParams) -> dict[str, Any]:
        """The body of `request`, which has its whole conversation, with its images as they were parsed.

        `sampling`: the request's parameters, with the session's. Raises UnsupportedParameter for what the API cannot
        express.
        """
        return upstream_body(request, sampling, self._upstream)

    async def answer(
        self,
        body: dict[str, Any],
        files: Mapping[str, ImageFile],
        emit: Callable[[list[Delta]], None],
        read_images: ReadImages,
    ) -> UpstreamAnswer:
        """Return the answer to a body; `emit` gets its deltas as they arrive.

        `files`: images of the request by digest. `read_images` reads the others. Raises InvalidRequest for an image
        that does not exist, or UpstreamFailed.
        """
        body = await with_images(body, files, read_images)
        try:
            content = orjson.dumps(body)
        except TypeError as error:
            raise InvalidRequest(f"the external model cannot be sent this as JSON: {error}", param="body") from None
        try:
            return await self._exchange(content, emit)
        except Failure as failure:
            raise self._told(failure) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _exchange(self, content: bytes, emit: Callable[[list[Delta]], None]) -> UpstreamAnswer:
        """Send a request and read its answer. Raises Failure."""
        import httpx

        try:
            async with self._client.stream("POST", self._url, content=content, headers=self._headers) as response:
                if response.status_code != _OK:
                    raise await _refusal(response)
                parts = AnswerParts()
                reader = _READERS[self._upstream.api](parts)
                try:
                    await _read(response, reader, lambda: _emit(parts, emit))
                    answer = reader.end()
                finally:
                    _emit(parts, emit)
                return answer._replace(model=answer.model or self._upstream.model)
        except httpx.ConnectTimeout:
            raise Failure("the external model cannot be reached in time", status=LATE) from None
        except httpx.TimeoutException:
            reason = f"the external model has sent nothing for {self._upstream.timeout_s:g} seconds"
            raise Failure(reason, status=LATE) from None
        except httpx.ConnectError as error:
            raise Failure("the external model cannot be reached", str(error), hidden=True) from None
        except (httpx.HTTPError, httpx.StreamError, OSError) as error:
            raise Failure("the connection to the external model breaks off", type(error).__name__) from None

    def _told(self, failure: Failure) -> UpstreamFailed:
        """The error that clients get, without the key and the address; the log has the address."""
        text = self._secrets.sub("...", failure.text)
        message = f"{failure.reason}: {short(text)}" if text.strip() else failure.reason
        reason = without_texts(message)
        logger.warning("external model failed", {"url": self._url, "status": failure.status, "reason": reason})
        error = UpstreamFailed(message, status=failure.status, retry_after_s=failure.retry_after_s)
        return error.showing(failure.reason if failure.hidden else None)


def _key_header(upstream: Upstream) -> dict[str, str]:
    key = upstream.key
    if key and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigurationError(f"the key of the external model {upstream.model!r} has characters that are not sent")
    if upstream.api is UpstreamApi.MESSAGES:
        return {**_VERSION, "x-api-key": key} if key else {**_VERSION}
    return {"authorization": f"Bearer {key}"} if key else {}


def _emit(parts: AnswerParts, emit: Callable[[list[Delta]], None]) -> None:
    if deltas := parts.take():
        emit(deltas)


async def _read(response: httpx.Response, reader: _Reader, emit: Callable[[], None]) -> None:
    """Read a stream of events, or an answer that is sent as a whole although a stream was requested."""
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    async with aclosing(_chunks(response)) as chunks:
        if kind == "application/json":
            reader.whole(json_of(b"".join([chunk async for chunk in chunks])))
            return
        if kind not in ("text/event-stream", ""):
            raise Failure("the external model answers with something that is no stream of events", kind)
        decoder = EventDecoder()
        async for chunk in chunks:
            ended = any(map(reader.read, decoder.feed(chunk)))
            emit()
            if ended:
                await _read_rest(chunks)
                return
        any(map(reader.read, decoder.end()))


async def _read_rest(chunks: AsyncIterator[bytes]) -> None:
    """Read the end of the connection's answer, so that it can be kept alive. The model's answer is complete."""
    import httpx

    with suppress(TimeoutError, Failure, httpx.HTTPError):
        async with asyncio.timeout(_REST_S):
            async for _ in chunks:
                pass


async def _chunks(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The bytes of an answer. Raises Failure if they are encoded or too many."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise Failure("the external model answers in a content encoding that was not asked for")
    count = 0
    async for chunk in response.aiter_raw():
        count += len(chunk)
        if count > MOST_BYTES:
            raise Failure(f"the external model's answer has more than {MOST_BYTES} bytes")
        yield chunk


async def _refusal(response: httpx.Response) -> Failure:
    """The failure of an answer with another status than 200."""
    data = b""
    with suppress(Failure):
        async for chunk in _chunks(response):
            data += chunk
            if len(data) > _MOST_OF_ERROR:
                break
    try:
        text = message_of(orjson.loads(data))
    except orjson.JSONDecodeError:
        plain = response.headers.get("content-type", "").startswith("text/plain")
        text = data.decode("utf-8", "replace") if plain else ""
    return refused(response.status_code, text, _seconds(response.headers.get("retry-after")))


def _seconds(header: str | None) -> float | None:
    """The seconds of `Retry-After`; None for a date or anything else."""
    try:
        seconds = float(header or "")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
