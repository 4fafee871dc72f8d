"""HTTP to one engine server. Every failure becomes a ProxyError that names the server.

A server that is gone raises EngineLost, so that another server may take over; one that answers with an error raises
another class. Keys are sent, and never part of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import orjson

from proxy.errors import EngineFailed, EngineLost, EngineUnavailable, InvalidRequest

_T = TypeVar("_T")
_CONNECT_S = 5.0
_CONTROL_S = 600.0
"""Timeout in seconds of control calls: they may load weights from disk."""

_PROBE_S = 5.0
_IDLE_S = 2.0
"""Keep-alive in seconds. Servers run on uvicorn, which closes idle connections after 5 s: reuse must stop earlier."""

_GONE = (429, 502, 503, 504)
"""Statuses after which another server may succeed; a server with a full queue sends 429 or 503."""

_EVENT = b"data:"
_LAST = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of servers started with `--api-key`; `admin` (SGLang's `--admin-api-key`) is for control calls."""

    api: str | None = None
    admin: str | None = None


NO_KEYS = Keys()


class ServerConnection:
    """The HTTP connections to the server at `url`. Raises InvalidRequest if `url` is malformed."""

    def __init__(self, url: str, keys: Keys = NO_KEYS) -> None:
        self.url = server_url(url)
        self._normal, self._control = _bearer(keys.api), _bearer(keys.admin or keys.api)
        self._client = httpx.AsyncClient(
            base_url=self.url,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the reader's own timeout limits the wait for a token
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256, keepalive_expiry=_IDLE_S),
            trust_env=False,
        )
        self._waiting: set[asyncio.Timeout] = set()

    async def probe(self, path: str) -> dict[str, Any] | None:
        """GET the JSON object at `path`; None if the server has no such path. Raises EngineLost, EngineUnavailable."""
        try:
            response = await self._alive().get(path, headers=self._normal, timeout=_PROBE_S)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        if response.status_code in _GONE:
            raise EngineLost(f"{self.url} answers {response.status_code}")
        self._check_key(response.status_code)
        if response.status_code != 200:
            return None
        value = _json(response.content, {})
        return value if isinstance(value, dict) else {}

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = _CONTROL_S) -> Any:
        """POST `body` as JSON; return the JSON answer. `limit_s`: timeout in seconds.

        Raises EngineLost, EngineUnavailable, InvalidRequest or EngineFailed.
        """
        headers = {**_JSON, **self._control}
        try:
            response = await self._alive().post(path, content=_encoded(body), headers=headers, timeout=limit_s)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        self._check(response.status_code, response.content, path)
        return _json(response.content, {})

    async def generate(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """POST without a timeout; return the JSON answer. Raises what `call` raises."""
        try:
            response = await self._until_cut(
                self._alive().post(path, content=_encoded(body), headers=self._with(headers))
            )
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        self._check(response.status_code, response.content, path)
        return _json(response.content, None)

    async def events(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> AsyncGenerator[Any, None]:
        """POST; yield the JSON of each server-sent event. Raises as `call` does; EngineLost if `[DONE]` is missing."""
        client = self._alive()
        asked = client.build_request("POST", path, content=_encoded(body), headers=self._with(headers))
        try:
            response = await self._until_cut(client.send(asked, stream=True))
            try:
                if response.status_code != 200:
                    self._check(response.status_code, await self._until_cut(response.aread()), path)
                async for line in _lines(self._pieces(response)):
                    if not line.startswith(_EVENT):
                        continue
                    data = line[len(_EVENT) :].strip()
                    if data == _LAST:
                        return
                    yield _json(data, None)
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        raise EngineLost(f"{self.url} closed the connection in the middle of a reply")

    def cut(self) -> None:
        """Abandon all replies in flight: each raises EngineLost."""
        now = asyncio.get_running_loop().time()
        for scope in self._waiting:
            if not scope.expired():
                scope.reschedule(now)

    async def close(self) -> None:
        """Close the connections for good; later calls raise EngineLost."""
        await self._client.aclose()

    async def _until_cut(self, answer: Awaitable[_T]) -> _T:
        try:
            async with asyncio.timeout(None) as scope:
                self._waiting.add(scope)
                try:
                    return await answer
                finally:
                    self._waiting.discard(scope)
        except TimeoutError:
            raise EngineLost(f"the reply from {self.url} was abandoned") from None

    async def _pieces(self, response: httpx.Response) -> AsyncIterator[bytes]:
        pieces = response.aiter_bytes()
        while (piece := await self._until_cut(anext(pieces, None))) is not None:
            yield piece

    def _alive(self) -> httpx.AsyncClient:
        if self._client.is_closed:
            raise EngineLost(f"the connection to {self.url} is closed")
        return self._client

    def _with(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {**_JSON, **self._normal, **headers}

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            raise EngineUnavailable(f"{self.url} needs a key: give --engine-arg api_key=KEY (and admin_api_key=KEY)")

    def _lost(self, error: httpx.HTTPError) -> EngineLost:
        return EngineLost(f"{self.url} does not answer ({type(error).__name__})")

    def _check(self, status: int, content: bytes, path: str) -> None:
        if status == 200:
            return
        message = _reason(content)
        if status in _GONE:
            raise EngineLost(f"{self.url} answers {status}: {message}")
        self._check_key(status)
        if status in (404, 405):
            raise EngineUnavailable(f"{self.url} has no {path} ({message})")
        if 400 <= status < 500:
            raise InvalidRequest(f"{self.url} refused {path}: {message}")
        raise EngineFailed(f"{self.url} failed in {path} with {status}: {message}")


_JSON = {"content-type": "application/json"}
_MOST_SHOWN = 500


def server_url(text: str) -> str:
    """Normalise a server's URL to `http://host:port`, without a trailing slash or `/v1`.

    Raises InvalidRequest if it is malformed or contains a key.
    """
    try:
        url = httpx.URL(text.strip())
    except httpx.InvalidURL as error:
        raise InvalidRequest(f"{text} is not the URL of a server: {error}", param="url") from None
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise InvalidRequest(f"{text} is not the URL of a server; give http://HOST:PORT", param="url")
    if url.userinfo:
        raise InvalidRequest(
            "a server's URL must not contain a key; give it with --engine-arg api_key=KEY", param="url"
        )
    return str(url).rstrip("/").removesuffix("/v1")


def _bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream into lines at newlines only. httpx also splits at characters of a model's text, such as U+2028."""
    rest: list[bytes] = []
    async for piece in pieces:
        *ended, tail = piece.split(b"\n")
        for line in ended:
            yield b"".join([*rest, line])
            rest.clear()
        rest.append(tail)


def _encoded(body: Mapping[str, Any] | None) -> bytes:
    return orjson.dumps(body or {}, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(content: bytes, otherwise: Any) -> Any:
    """Parse JSON. If it is malformed, return `otherwise`; raise EngineFailed if that is None."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if otherwise is None:
            raise EngineFailed(f"the server's answer is not JSON: {content[:80]!r}") from None
        return otherwise


def _reason(content: bytes) -> str:
    """The error message in an answer, at most 500 characters."""
    value = _json(content, {})
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message or content.decode("utf-8", "replace"))[:_MOST_SHOWN]
