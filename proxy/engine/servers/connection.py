"""Requests to one engine server. Every failure becomes a ProxyError that names the server.

A server that is lost raises EngineLost, so that another server can take over; an error response raises another class.
Keys are sent to the server and are never part of a message.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from proxy.engine.servers.http import Disconnected, Exchange, HttpClient, Unreached, fields_of
from proxy.images.quoted import without_images
from proxy.types import SamplingParams
from tokengrove.errors import EngineBusy, EngineFailed, EngineLost, EngineUnavailable, InvalidRequest

_CONTROL_S = 600.0
"""Timeout in seconds of control calls: they may load weights from disk."""

_PROBE_S = 5.0
_OK = 200
_BUSY = (429, 503)
"""Statuses of a server with a full queue."""

_GONE = (*_BUSY, 502, 504)
"""Statuses after which another server may succeed. 502 and 504 come from a proxy in front of an unavailable server."""

_EVENT = b"data:"
_LAST = b"[DONE]"


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of servers started with `--api-key`; `admin` (SGLang's `--admin-api-key`) is for control calls."""

    api: str | None = None
    admin: str | None = None


NO_KEYS = Keys()


class NotJson(Exception):
    """The answer is not JSON. `content`: the answer."""

    def __init__(self, content: bytes | bytearray) -> None:
        super().__init__("an answer is not JSON")
        self.content = content


class NotServed(EngineUnavailable):
    """The server answers 404 or 405: it has no such path, or not what the request names. `reason`: its message."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class Stopped(Exception):
    """The reader needs no more of a reply that the server has not ended. The connection is closed."""


class EventStream(Exchange):
    """A reply of server-sent events. `read` receives the JSON of all events that arrived together.

    `read` returns True if the events end the reply, and raises `Stopped` to end it before the server does. Only
    newlines end a line: the text of a model may contain other line separators, such as U+2028. `begun`: True once an
    event has arrived, False if only other data has, None before.
    """

    def __init__(self, read: Callable[[list[Any]], bool]) -> None:
        super().__init__()
        self.begun: bool | None = None
        self.complete = False
        self._read, self._rest = read, [b""]

    def feed(self, data: bytes) -> bool:
        self._rest.append(data)
        if b"\n" not in data:  # the parts of a long line are joined once
            self.begun = self.begun or False
            return self.complete
        *lines, rest = b"".join(self._rest).split(b"\n")
        self._rest = [rest]
        events = []
        for line in lines:
            if line.startswith(_EVENT):
                event = line[len(_EVENT) :].strip()
                if event == _LAST:
                    self.complete = True
                    break
                try:
                    events.append(orjson.loads(event))
                except orjson.JSONDecodeError:
                    events.append(_with_nan(event))
        self.begun = self.begun or bool(events)
        if events and self._read(events):
            self.complete = True
        return self.complete

    def take(self, event: Any) -> None:
        """Read an event that did not come in a stream, the only one of its reply."""
        self._read([event])


class WholeReply(EventStream):
    """A reply of one JSON value, for `ServerConnection.answer`. `read` receives it once it is complete."""

    def feed(self, data: bytes) -> bool:
        return Exchange.feed(self, data)


class ServerConnection:
    """The HTTP connections to the server at `url`. Raises InvalidRequest if `url` or a key is malformed."""

    def __init__(self, url: str, keys: Keys = NO_KEYS) -> None:
        self.url = server_url(url)
        self._normal, self._control = _bearer(keys.api), _bearer(keys.admin or keys.api)
        self._client = HttpClient(self.url)
        self._heads: dict[str, bytes] = {}
        self._replies: set[Exchange] = set()

    async def probe(self, path: str) -> dict[str, Any] | None:
        """GET the JSON object at `path`, or None if there is none. Raises EngineLost, EngineUnavailable."""
        answer = await self._within(_PROBE_S, "GET", path, self._normal, ())
        if answer.status in _GONE:
            raise EngineLost(f"{self.url} answers {answer.status}")
        self._check_key(answer.status)
        if answer.status != _OK:
            return None
        value = _json(answer.body, ())
        return value if isinstance(value, dict) else None

    async def call(self, path: str, body: Mapping[str, Any] | None = None, *, limit_s: float = _CONTROL_S) -> Any:
        """POST `body` as JSON; return the JSON answer. `limit_s`: timeout in seconds.

        Raises EngineLost, EngineUnavailable, InvalidRequest or EngineFailed.
        """
        answer = await self._within(limit_s, "POST", path, {**_JSON, **self._control}, [_encoded(body or {})])
        self._check(answer, path)
        return _json(answer.body, {})

    async def generate(self, path: str, body: Sequence[bytes], headers: Mapping[str, str]) -> Any:
        """POST JSON, given in parts, without a timeout; return the JSON answer. Raises like `call`."""
        answer = Exchange()
        await self._sample(path, body, headers, answer)
        return _json(answer.body, None)

    async def stream(self, path: str, body: Sequence[bytes], headers: Mapping[str, str], reply: EventStream) -> None:
        """POST JSON, given in parts, without a timeout; return when the reply is complete.

        Raises like `call`, and the error that `reply` failed with; EngineFailed if the answer is not an event stream;
        EngineLost if the stream ends before the reply is complete.
        """
        try:
            await self._sample(path, body, headers, reply)
        except NotJson as error:
            raise _no_json(error.content) from None
        if reply.begun is False and not reply.complete:
            raise EngineFailed(f"{self.url} answered {path} with something that is no stream of events")
        if not reply.complete:
            raise EngineLost(f"{self.url} closed the connection in the middle of a reply")

    async def answer(self, path: str, body: Sequence[bytes], headers: Mapping[str, str], reply: EventStream) -> None:
        """POST JSON, given in parts, without a timeout; return when `reply`, a WholeReply, is read.

        Raises like `call`, and the error that `reply` failed with.
        """
        await self._sample(path, body, headers, reply)
        reply.take(_json(reply.body, None))

    def cut(self) -> None:
        """Abandon all replies in flight: each raises EngineLost."""
        silent = asyncio.get_running_loop().time() - _PROBE_S
        for reply in self._replies:
            ran = reply.status > 0 or reply.sent < silent  # else the failed probe began before this was sent
            reply.fail(EngineLost(f"the reply from {self.url} was abandoned", ran=ran))

    async def close(self) -> None:
        """Close the connections permanently; later calls raise EngineLost."""
        self._client.close()

    async def _within(
        self, limit_s: float, method: str, path: str, headers: Mapping[str, str], body: Sequence[bytes]
    ) -> Exchange:
        answer = Exchange()
        try:
            async with asyncio.timeout(limit_s):
                head = self._client.head(method, path, headers)
                await self._client.send(answer, head, body, repeat=method == "GET")
        except TimeoutError:
            raise EngineLost(f"{self.url} does not answer within {limit_s:g} s") from None
        except Disconnected as error:
            raise self._lost(error) from None
        return answer

    async def _sample(self, path: str, body: Sequence[bytes], headers: Mapping[str, str], reply: Exchange) -> None:
        """POST a sampling request, until `cut`. It may be sent twice, since only one reply is read."""
        head = self._heads.get(path)
        if head is None:
            head = self._heads[path] = self._client.head("POST", path, {**_JSON, **self._normal})
        self._replies.add(reply)
        try:
            await self._client.send(reply, head + fields_of(headers) if headers else head, body, repeat=True)
        except Disconnected as error:
            raise self._lost(error) from None
        finally:
            self._replies.discard(reply)
        if reply.status != _OK:
            self._check(reply, path, "the engine server")  # agents see this error if their request is refused

    def _lost(self, error: Disconnected) -> EngineLost:
        if self._client.closed:
            return EngineLost(f"the connection to {self.url} is closed")
        return EngineLost(f"{self.url} does not answer ({error})", ran=not isinstance(error, Unreached))

    def _check_key(self, status: int) -> None:
        if status in (401, 403):
            raise EngineUnavailable(f"{self.url} needs a key: give --engine-arg api_key=KEY (and admin_api_key=KEY)")

    def _check(self, answer: Exchange, path: str, refused_by: str | None = None) -> None:
        """Raise the error of an answer. `refused_by`: the server's name in an InvalidRequest; None: its URL."""
        status = answer.status
        if status == _OK:
            return
        message = _reason(answer.body)
        if status in _GONE:
            raise (EngineBusy if status in _BUSY else EngineLost)(f"{self.url} answers {status}: {message}")
        self._check_key(status)
        if status in (404, 405):
            raise NotServed(f"{self.url} has no {path} ({message})", message)
        if 400 <= status < 500:
            refusal = InvalidRequest(f"{refused_by or self.url} refused {path}: {message}")
            if refused_by is not None:
                field = _sampling_field(answer.body)
                refusal.param = field
                refusal.showing(f"{refused_by} refused the request" + (f" because of its '{field}'" if field else ""))
            raise refusal
        raise EngineFailed(f"{self.url} failed in {path} with {status}: {message}")


_JSON = {"content-type": "application/json"}
_MOST_SHOWN = 500


def server_url(text: str) -> str:
    """Return a server's URL normalised to `http://host:port`, without a trailing slash or `/v1`.

    Raises InvalidRequest if it is malformed or contains a key.
    """
    text = text.strip()
    if "@" in text:
        raise InvalidRequest(
            "a server's URL must not contain a key; give it with --engine-arg api_key=KEY", param="url"
        )
    try:
        url = urlsplit(text)
        port = "" if url.port is None else f":{url.port}"
    except ValueError as error:
        raise InvalidRequest(f"{text} is not the URL of a server: {error}", param="url") from None
    malformed = not _plain(text) or url.query or url.fragment
    if malformed or url.scheme not in ("http", "https") or not url.hostname:
        raise InvalidRequest(f"{text} is not the URL of a server; give http://HOST:PORT", param="url")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    return f"{url.scheme}://{host}{port}{url.path}".rstrip("/").removesuffix("/v1")


def _plain(text: str) -> bool:
    """True if `text` may be part of a request's head."""
    return text.isascii() and text.isprintable() and " " not in text


def _bearer(key: str | None) -> dict[str, str]:
    if not key:
        return {}
    if not _plain(key):
        raise InvalidRequest("a server's key must be ASCII characters without spaces", param="api_key")
    return {"authorization": f"Bearer {key}"}


class Written(Protocol):
    """An object that serialises itself as JSON, in parts."""

    def json(self) -> list[bytes]:
        """The parts of the JSON text."""


def with_prompt(body: Mapping[str, Any], field: str, prompt: Written) -> list[bytes]:
    """Return the JSON object `body` in parts, with the ids of a prompt as an additional field."""
    try:
        head = orjson.dumps(body)
    except TypeError:
        head = _encoded(body)  # raises the error
    return [head[:-1] + b',"%b":' % field.encode(), *prompt.json(), b"}"]


def _encoded(body: Mapping[str, Any]) -> bytes:
    """Encode a request. Raises InvalidRequest if orjson cannot write it.

    orjson reads deeper JSON than it writes, and sums may exceed 64 bits.
    """
    try:
        return orjson.dumps(body)
    except TypeError as error:
        raise InvalidRequest(f"the engine server cannot be sent this as JSON: {error}", param="body") from None


def _json(content: bytes | bytearray, otherwise: Any) -> Any:
    """Parse JSON. If it is malformed, return `otherwise`, or raise EngineFailed if `otherwise` is None."""
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        try:
            return _with_nan(content)
        except NotJson:
            if otherwise is None:
                raise _no_json(content) from None
            return otherwise


def _with_nan(content: bytes | bytearray) -> Any:
    """Parse JSON with NaN or Infinity, which Python servers write. Raises NotJson.

    The reader of a number then reports which number is wrong.
    """
    try:
        if b"NaN" in content or b"Infinity" in content:
            return json.loads(content)
    except (ValueError, RecursionError):
        pass
    raise NotJson(content)


def _no_json(content: bytes | bytearray) -> EngineFailed:
    return EngineFailed(f"the server's answer is not JSON: {bytes(content[:80])!r}").showing(
        "the engine's answer is not JSON"
    )


def _sampling_field(content: bytearray) -> str | None:
    """The sampling field that an answer of vLLM refuses; None if it names none."""
    value = _json(content, {})
    error = value.get("error") if isinstance(value, dict) else None
    named = error.get("param") if isinstance(error, dict) else None
    return named if named in SamplingParams._fields else None


def _reason(content: bytearray) -> str:
    """The error message in an answer, at most 500 characters."""
    value = _json(content, {})
    error = value.get("error", value) if isinstance(value, dict) else value
    message = error.get("message", error.get("error_message", error)) if isinstance(error, dict) else error
    return without_images(str(message or content.decode("utf-8", "replace")))[:_MOST_SHOWN]
