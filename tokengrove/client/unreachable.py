"""Errors for a server without an answer, temporary or permanent."""

from __future__ import annotations

import ssl
from typing import ClassVar

import httpx

from tokengrove.errors import EngineUnavailable


class ServerUnreachable(EngineUnavailable):
    """No answer from the server's address: nothing listens there, the connection broke, or the timeout passed.

    An error page of a gateway that did not reach the server (502, 503 or 504) also counts.
    """

    code: ClassVar[str] = "server_unreachable"

    @property
    def unsent(self) -> bool:
        """Whether no connection was made, so the server certainly did not receive the call."""
        return isinstance(self.__cause__, httpx.ConnectError | httpx.ConnectTimeout)


class NoAddress(ServerUnreachable):
    """The server's address is not a URL, or this client can never use it. Calls are not retried."""

    code: ClassVar[str] = "no_address"
    retryable = False


def unreachable(error: httpx.TransportError, url: str, *, in_process: bool) -> ServerUnreachable:
    """The error for a failed connection to `url`, to be raised from `error`."""
    if isinstance(error, httpx.UnsupportedProtocol):
        return NoAddress(f"{url!r} is not a URL of a server; it has to begin with http:// or https://")
    reason = f"{type(error).__name__} {error}".rstrip()
    if in_process:
        stopped = isinstance(error, httpx.ConnectError)  # an application does not start again
        return (NoAddress if stopped else ServerUnreachable)(f"no answer from the app in this process ({reason})")
    kind = NoAddress if _stays(error) else ServerUnreachable
    return kind(f"no answer from {url} ({reason}); is the server running and the URL correct?")


def _stays(error: BaseException | None) -> bool:
    """Whether the failure is permanent: the certificate is not trusted, or the request is invalid."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError | httpx.LocalProtocolError):
            return True
        error = error.__cause__ or error.__context__
    return False
