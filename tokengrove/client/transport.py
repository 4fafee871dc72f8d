"""Converts calls to arguments of HTTP requests, and responses to JSON or errors.

An error of the server is raised as the class of `tokengrove.errors` that the server raised.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import numpy as np
import orjson

from tokengrove.client.asgi import ASGIApp
from tokengrove.client.http_clients import IN_PROCESS
from tokengrove.client.operations import Call
from tokengrove.client.retries import RETRY_S, Attempts, Clock, checked_retry_s
from tokengrove.client.running_app import AppHold
from tokengrove.client.unreachable import ServerUnreachable, unreachable
from tokengrove.client.values import Json
from tokengrove.errors import InvalidRequest, ProxyError, UpstreamFailed, classes_by, told

TIMEOUT_S = 60.0
"""Far above the response time of a healthy server. A call's own `wait_s` is added to it."""

LIMITS = httpx.Limits(max_connections=None)
"""Every call has its own connection. With the default of 100, calls would time out behind long generations."""


class Connection:
    """The common part of both clients: the server's URL or application, the admin key, the timeout and the retry time.

    `url`: the address of the server; for an application in this process, only `http_client` can reach it. `app`: the
    application; None over a network. `hold`: this client's hold on the application. `clock`: waits between attempts.
    """

    def __init__(
        self,
        url: str | None,
        admin_key: str | None,
        timeout_s: float,
        app: ASGIApp | None = None,
        retry_s: float = RETRY_S,
    ) -> None:
        if (url is None) == (app is None):
            raise InvalidRequest(
                "a client needs either the url of a server or the app of this process, and this one got "
                + ("none of them" if url is None else "both of them"),
                param="url",
            )
        self.url = IN_PROCESS if url is None else url.rstrip("/")
        self.app = app
        self.hold = None if app is None else AppHold(app)
        self.admin_key = admin_key
        self.timeout_s = timeout_s
        self.retry_s = checked_retry_s(retry_s)
        self.clock = Clock()

    def attempts(self, call: Call, retry_s: float | None) -> Attempts:
        """The attempts of a call, for `retry_s` seconds (None: the client's own)."""
        return Attempts(call, self.retry_s if retry_s is None else checked_retry_s(retry_s), self.clock)

    def arguments(self, call: Call) -> dict[str, Any]:
        key = call.key or self.admin_key
        headers = {**call.headers, **({"authorization": f"Bearer {key}"} if key else {})}
        if call.idempotency_key is not None:
            headers["idempotency-key"] = call.idempotency_key
        content = None
        if call.body is not None:
            headers["content-type"] = "application/json"
            content = _encoded(call.body)
        timeout_s = (self.timeout_s if call.timeout_s is None else call.timeout_s) + call.extra_timeout_s
        return {
            "method": call.method,
            "url": self.url + call.path,
            "content": content,
            "headers": headers,
            "params": dict(call.params) or None,
            "timeout": httpx.Timeout(timeout_s, connect=min(timeout_s, self.timeout_s)),
        }

    def unreachable(self, error: httpx.TransportError) -> ServerUnreachable:
        return unreachable(error, self.url, in_process=self.hold is not None)


def _encoded(body: Mapping[str, Json]) -> bytes:
    """Encode as JSON; numpy numbers and arrays are allowed. Raises InvalidRequest for other types and for NaN."""
    try:
        return _json(body)
    except (TypeError, ValueError):
        for field, value in body.items():
            try:
                _json(value)
            except (TypeError, ValueError) as error:
                raise InvalidRequest(f"{field!r} cannot be sent as JSON: {error}", param=field) from None
        raise


def _json(value: Json) -> bytes:
    # not orjson: it encodes NaN as null, which would unset a reward instead of failing
    return json.dumps(value, allow_nan=False, default=_plain).encode()


def _plain(value: Any) -> Json:
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def decode(response: httpx.Response, raw: bool = False) -> Json:
    """The answer: its bytes if `raw`, else its decoded JSON. Raises the server's error."""
    if not response.is_success:
        raise _error(response)
    if raw:
        return response.content
    try:
        return orjson.loads(response.content)
    except orjson.JSONDecodeError:
        raise ProxyError(f"{response.url} did not answer with JSON; is it a tokengrove server?") from None


def _error(response: httpx.Response) -> ProxyError:
    """The error of an answer, chosen by status alone if the body is not the server's (an error page of a gateway)."""
    try:
        shown = orjson.loads(response.content)["error"]
        message, code, param = shown["message"], shown.get("code"), shown.get("param")
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError):
        message, code, param = f"HTTP {response.status_code}: {response.text[:200]}", None, None
        if response.status_code in _OF_GATEWAYS:
            where = f"{response.url.scheme}://{response.url.netloc.decode()}"  # a path may contain a key
            message = f"no answer from the server behind {where} ({message}); is it running and the URL correct?"
            code = ServerUnreachable.code
    kind = _BY_CODE.get(code) or _BY_STATUS.get(response.status_code, ProxyError)
    error = told(kind, message, param=param, retry_after_s=_seconds(response.headers.get("retry-after")))
    if isinstance(error, UpstreamFailed):
        error.answer_with(response.status_code)
    return error


def _seconds(header: str | None) -> float | None:
    """The seconds of `Retry-After`: a number, or the time until a date, which gateways may send; None for neither."""
    try:
        return None if header is None else float(header)
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(str(header)).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


_OF_GATEWAYS = (502, 503, 504)
_BY_CODE = classes_by("code")
_BY_STATUS = classes_by("status")
