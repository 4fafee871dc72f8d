"""Between operations and HTTP: a `Call` becomes the arguments of a request, a response becomes JSON or an error.

A failure that the server answered comes back as the class of `proxy.errors` that it was there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

import httpx
import numpy as np
import orjson

from proxy.client.operations import Call
from proxy.client.values import Json
from proxy.errors import EngineUnavailable, InvalidRequest, ProxyError

TIMEOUT_S = 60.0
"""Far above any answer of a healthy server; a wait that the caller asks for (`wait_s`) comes on top."""


class ServerUnreachable(EngineUnavailable):
    """No answer came from the server's address: nothing listens there, the connection broke, or it took too long."""

    code: ClassVar[str] = "server_unreachable"


class Connection:
    """Where the server is and who asks: what both clients have, and all that a request is made of."""

    def __init__(self, url: str, admin_key: str | None, timeout_s: float) -> None:
        self.url = url.rstrip("/")
        self.admin_key = admin_key
        self.timeout_s = timeout_s

    def arguments(self, call: Call) -> dict[str, Any]:
        key = call.key or self.admin_key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        content = None
        if call.body is not None:
            headers["content-type"] = "application/json"
            content = _encoded(call.body)
        timeout_s = self.timeout_s + call.extra_timeout_s
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": content,
            "headers": headers,
            "params": dict(call.params) or None,
            "timeout": timeout_s,
        }

    def unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        return ServerUnreachable(f"no answer from {self.url}: {type(error).__name__} {error}".rstrip())


def _encoded(body: Mapping[str, Json]) -> bytes:
    """JSON; numpy numbers and arrays are welcome. Raises InvalidRequest for what JSON cannot say, NaN included."""
    try:
        # not orjson: it writes NaN as null, which would unset a reward instead of being refused
        return json.dumps(body, allow_nan=False, default=_plain).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"this cannot be sent as JSON: {error}") from None


def _plain(value: Any) -> Json:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def decode(response: httpx.Response, raw: bool = False) -> Json:
    """What was answered: decoded, or as it came. Raises the error that it is."""
    if not response.is_success:
        raise _error(response)
    if raw:
        return response.content
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        raise ProxyError(f"{response.url} did not answer with JSON; is it a tokengrove server?") from None


def _error(response: httpx.Response) -> ProxyError:
    """The error that an answer carries; from its status alone where the body is not one of ours (a gateway's page)."""
    try:
        told = orjson.loads(response.content)["error"]
        message, code, param = told["message"], told.get("code"), told.get("param")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        message, code, param = f"HTTP {response.status_code}: {response.text[:200]}", None, None
    kind = _BY_CODE.get(code) or _BY_STATUS.get(response.status_code, ProxyError)
    error = kind.__new__(kind)  # not every class takes a message: some word their own from numbers that we lack
    ProxyError.__init__(error, message, param=param, retry_after_s=_seconds(response.headers.get("retry-after")))
    return error


def _seconds(header: str | None) -> float | None:
    try:
        return None if header is None else float(header)
    except ValueError:
        return None  # an HTTP date, which this server never sends


def _by(attribute: str) -> dict[Any, type[ProxyError]]:
    """The classes of the error tree by `code` or `status`; of several with one status, the nearest to the root."""
    found: dict[Any, type[ProxyError]] = {}
    level: list[type[ProxyError]] = [ProxyError]
    while level:
        for kind in level:
            found.setdefault(getattr(kind, attribute), kind)
        level = [below for kind in level for below in kind.__subclasses__()]
    return found


_BY_CODE = _by("code")
_BY_STATUS = _by("status")
