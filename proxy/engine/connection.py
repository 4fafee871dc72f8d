"""HTTP to one engine server. Whatever goes wrong on the way becomes a ProxyError that says which server it was.

A server that is gone is an EngineLost: somebody else may go on. One that answers with an error is not.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import orjson

from proxy.errors import EngineFailed, EngineLost, EngineUnavailable, InvalidRequest

_CONNECT_S = 5.0
_CONTROL_S = 600.0
"""A control call may load weights from a disk; a probe is short."""

_PROBE_S = 5.0
_GONE = (502, 503, 504)
_EVENT = b"data:"
_LAST = b"[DONE]"


class Connection:
    """The connections to the server at `url`; `headers` go with every request."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers=dict(headers or {}),
            timeout=httpx.Timeout(None, connect=_CONNECT_S),  # how long a token may take is for others to say
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            trust_env=False,
        )

    async def probe(self, path: str) -> Any | None:
        """The JSON at `path`; None where there is no such path. Raises EngineLost."""
        try:
            response = await self._client.get(path, timeout=_PROBE_S)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        if response.status_code in _GONE:
            raise EngineLost(f"{self.url} answers {response.status_code}")
        if response.status_code != 200:
            return None
        return _json(response.content, {})

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """POST `body` and the JSON that comes back.

        Raises EngineLost, EngineUnavailable, InvalidRequest or EngineFailed.
        """
        try:
            response = await self._client.post(path, content=_encoded(body), headers=_JSON, timeout=_CONTROL_S)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        self._check(response.status_code, response.content, path)
        return _json(response.content, {})

    async def generate(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        """POST without any limit of time. Raises as `call`."""
        try:
            response = await self._client.post(path, content=_encoded(body), headers={**_JSON, **headers})
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        self._check(response.status_code, response.content, path)
        return _json(response.content, None)

    async def events(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> AsyncIterator[Any]:
        """POST and the JSON of each server-sent event. Raises as `call`, EngineLost when it ends before its end."""
        try:
            async with self._client.stream(
                "POST", path, content=_encoded(body), headers={**_JSON, **headers}
            ) as response:
                if response.status_code != 200:
                    self._check(response.status_code, await response.aread(), path)
                async for line in response.aiter_lines():
                    data = line.encode()
                    if not data.startswith(_EVENT):
                        continue
                    data = data[len(_EVENT) :].strip()
                    if data == _LAST:
                        return
                    yield _json(data, None)
        except httpx.HTTPError as error:
            raise self._lost(error) from None
        raise EngineLost(f"{self.url} ended a reply in its middle")

    async def close(self) -> None:
        await self._client.aclose()

    def _lost(self, error: httpx.HTTPError) -> EngineLost:
        return EngineLost(f"{self.url} is gone ({type(error).__name__})")

    def _check(self, status: int, content: bytes, path: str) -> None:
        if status == 200:
            return
        message = _reason(content)
        if status in _GONE:
            raise EngineLost(f"{self.url} answers {status}: {message}")
        if status in (404, 405):
            raise EngineUnavailable(f"{self.url} has no {path}")
        if 400 <= status < 500:
            raise InvalidRequest(f"{self.url} refused {path}: {message}")
        raise EngineFailed(f"{self.url} failed in {path} with {status}: {message}")


_JSON = {"content-type": "application/json"}
_MOST_SHOWN = 500


def _encoded(body: Mapping[str, Any] | None) -> bytes:
    return orjson.dumps(body or {}, option=orjson.OPT_SERIALIZE_NUMPY)


def _json(content: bytes, otherwise: Any) -> Any:
    """Raises EngineFailed for what is no JSON where there must be some (`otherwise` None)."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        if otherwise is None:
            raise EngineFailed(f"the server answered with what is no JSON: {content[:80]!r}") from None
        return otherwise


def _reason(content: bytes) -> str:
    value = _json(content, {})
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message or content.decode("utf-8", "replace"))[:_MOST_SHOWN]
