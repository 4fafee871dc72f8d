"""All errors that clients can receive, independent of the API that reports them.

    ProxyError                        status  code
    ├── InvalidRequest                400     invalid_request
    │   ├── UnsupportedParameter      400     unsupported_parameter
    │   ├── ContextLengthExceeded     400     context_length_exceeded
    │   └── KeyInUse                  400     key_in_use
    ├── Unauthorized                  401     invalid_api_key
    ├── Forbidden                     403     forbidden
    │   ├── HostNotAllowed            403     host_not_allowed
    │   ├── OriginNotAllowed          403     origin_not_allowed
    │   ├── SessionClosed             403     session_closed
    │   └── LimitReached              403     session_limit_reached
    ├── NotFound                      404     not_found
    │   ├── SessionNotFound           404     session_not_found
    │   ├── ModelNotFound             404     model_not_found
    │   └── PreviousResponseNotFound  404     previous_response_not_found
    ├── MethodNotAllowed              405     method_not_allowed
    ├── RequestTimeout                408     request_timeout
    ├── EndedOtherwise                409     ended_otherwise
    ├── IdempotencyMismatch           409     idempotency_mismatch
    ├── AnnotatedOtherwise            409     annotated_otherwise
    ├── SessionArchived               410     session_archived
    ├── BodyTooLarge                  413     body_too_large
    ├── UnsupportedMediaType          415     unsupported_media_type
    ├── TooManyRequests               429     rate_limit_exceeded
    ├── HeadersTooLarge               431     headers_too_large
    ├── EngineFailed                  502     engine_failed
    ├── UpstreamFailed                502     upstream_failed (or 400, 404, 413, 422, 429, 504)
    ├── EngineUnavailable             503     engine_unavailable
    │   ├── EngineLost                503     engine_lost
    │   │   └── EngineBusy            503     engine_busy
    │   └── EngineIncapable           501     engine_incapable
    ├── StoreUnavailable              503     store_unavailable
    ├── ArchiveUnavailable            503     archive_unavailable
    ├── ScratchFull                   503     scratch_full
    ├── TooManyConnections            503     too_many_connections
    ├── TunnelUnavailable             503     tunnel_unavailable
    └── EngineTimeout                 504     timeout

ProxyError itself is 500, internal_error. ConfigurationError is raised at startup and ends the process.
"""

from __future__ import annotations

import json
import reprlib
import shlex
import sys
from collections.abc import Mapping
from itertools import islice
from typing import Any, ClassVar, Self

SHUTTING_DOWN = "the server is shutting down; send the request to another replica, or again after the restart"
"""The message of every EngineUnavailable that a shutdown causes."""


_MOST_MESSAGE_BYTES = 3000
"""The most JSON bytes of a message: it may quote a client's image of several megabytes."""

_MOST_PARAM_BYTES = 300
_MOST_BRIEF = 300


class _Brief(reprlib.Repr):
    """Shows the first entries of a value and of the values inside it, but nothing deeper."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxlist, self.maxdict, self.maxstring = 2, 4, 4, 120

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        """Sort only the first keys."""
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)


_BRIEF = _Brief()


def brief(value: object) -> str:
    """A value from a client for a message: its `repr`, shortened. The value may have any depth and length."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _MOST_BRIEF else f"{text[:_MOST_BRIEF]}..."


def short(text: str) -> str:
    """A text for a note that may quote a client. A long text loses its middle."""
    return _shortened(text, _MOST_PARAM_BYTES)


def _shortened(text: str, most: int) -> str:
    """The text without its middle if it has more than `most` bytes as JSON."""
    short, half = text, most // 2
    while _json_bytes(short) > most:
        short = f"{text[:half]} ... ({len(text) - 2 * half:,} characters left out) ... {text[-half:]}"
        half //= 2
    return short


def _json_bytes(text: str) -> int:
    return len(json.dumps(text, ensure_ascii=False).encode(errors="replace"))


class ProxyError(Exception):
    """A failure with an HTTP status and a stable code. `retryable`: a retry may succeed.

    `param` names the invalid field. `retry_after_s` becomes the `retry-after` header, in seconds, at most 30: some SDKs
    ignore longer waits. `details`: error details that clients of the Messages API read to choose an alternative. A very
    long message or `param`, which quotes the request, loses its middle. `shown`: the message for agents in place of one
    that quotes an engine's answer; the log and administrators get the full message.
    """

    status: int = 500
    code: ClassVar[str] = "internal_error"
    retryable: bool = True

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        details: Mapping[str, object] | None = None,
    ) -> None:
        message = _shortened(message, _MOST_MESSAGE_BYTES)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else _shortened(param, _MOST_PARAM_BYTES)
        self.retry_after_s = retry_after_s
        self.details = details
        self.shown: str | None = None

    def showing(self, message: str | None) -> Self:
        """Set the message that agents see, and return the error. None: its own message."""
        self.shown = message
        return self


def classes_by(attribute: str) -> dict[Any, type[ProxyError]]:
    """The error classes by `code` or `status`. If several share a status, it is the class nearest to the root."""
    found: dict[Any, type[ProxyError]] = {}
    level: list[type[ProxyError]] = [ProxyError]
    while level:
        for kind in level:
            found.setdefault(getattr(kind, attribute), kind)
        level = [below for kind in level for below in kind.__subclasses__()]
    return found


def told(
    kind: type[ProxyError], message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> ProxyError:
    """An error of a class with a given message. Some classes otherwise compute their messages from numbers."""
    error = kind.__new__(kind)
    ProxyError.__init__(error, message, param=param, retry_after_s=retry_after_s)
    return error


def codes(kind: type[ProxyError] = ProxyError) -> set[str]:
    """The codes of all errors of a kind."""
    return {kind.code}.union(*map(codes, kind.__subclasses__()))


class InvalidRequest(ProxyError):
    """The body, a field, a header or the URL is invalid."""

    status = 400
    code = "invalid_request"
    retryable = False


class UnsupportedParameter(InvalidRequest):
    """A known field that this server or its engine does not support."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt plus `max_tokens`, exceeds the context length. Lengths are in tokens."""

    code = "context_length_exceeded"

    def __init__(
        self, *, prompt_tokens: int, context_tokens: int, max_tokens: int | None = None, at_least: bool = False
    ) -> None:
        """`at_least`: the prompt was not encoded, and `prompt_tokens` is a lower bound."""
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.max_tokens = max_tokens
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
            f"{'at least ' if at_least else ''}{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )


class KeyInUse(InvalidRequest):
    """The chosen session key still belongs to a live session."""

    code = "key_in_use"


class Unauthorized(ProxyError):
    """The key is missing, unknown, expired, or not one of the session's."""

    status = 401
    code = "invalid_api_key"
    retryable = False


class Forbidden(ProxyError):
    """The key is valid but does not permit this operation."""

    status = 403
    code = "forbidden"
    retryable = False


class ReadOnlyKey(Forbidden):
    """The request changes something, but its key may only read."""

    code = "read_only_key"


class HostNotAllowed(Forbidden):
    """The server may not be called with this `Host`. The status is not 421, which clients may retry."""

    code = "host_not_allowed"


class OriginNotAllowed(Forbidden):
    """A page of another site sent the request, and the server requires no key."""

    code = "origin_not_allowed"


class SessionClosed(Forbidden):
    """The session has ended or expired. The status is not 409, which SDKs retry."""

    code = "session_closed"


class LimitReached(Forbidden):
    """A limit of the session (turns, tokens or deadline) is reached."""

    code = "session_limit_reached"


class NotFound(ProxyError):
    """The path or interaction does not exist."""

    status = 404
    code = "not_found"
    retryable = False


class SessionNotFound(NotFound):
    """The session does not exist."""

    code = "session_not_found"


class ModelNotFound(NotFound):
    """The request names a model that this server, or this session, does not have."""

    code = "model_not_found"


class PreviousResponseNotFound(NotFound):
    """`previous_response_id` is not a complete response of this session."""

    code = "previous_response_not_found"


class MethodNotAllowed(ProxyError):
    """The path exists, but only with other HTTP methods."""

    status = 405
    code = "method_not_allowed"
    retryable = False


class RequestTimeout(ProxyError):
    """The request did not arrive whole in time."""

    status = 408
    code = "request_timeout"


class EndedOtherwise(ProxyError):
    """The session has ended with different fields than this call has."""

    status = 409
    code = "ended_otherwise"
    retryable = False


class IdempotencyMismatch(ProxyError):
    """The Idempotency-Key belongs to an earlier call with different contents."""

    status = 409
    code = "idempotency_mismatch"
    retryable = False


class AnnotatedOtherwise(ProxyError):
    """A trainer told another value of the same token, step and name before."""

    status = 409
    code = "annotated_otherwise"
    retryable = False


class SessionArchived(ProxyError):
    """The session is in an archive. `file`: the URL of its file, which agents are not shown."""

    status = 410
    code = "session_archived"
    retryable = False

    def __init__(self, session_id: str, file: str) -> None:
        self.session_id, self.file = session_id, file
        super().__init__(
            f"session {brief(session_id)} is archived in {file}; bring it back with: "
            f"tokengrove archive restore {shlex.quote(session_id)}",
            param="session_id",
        )
        self.shown = f"session {brief(session_id)} is archived"


class BodyTooLarge(ProxyError):
    """The body exceeds `--max-body-bytes`; the rest of it was not read."""

    status = 413
    code = "body_too_large"
    retryable = False


class UnsupportedMediaType(ProxyError):
    """The body is not declared as JSON."""

    status = 415
    code = "unsupported_media_type"
    retryable = False


class TooManyRequests(ProxyError):
    """A limit of concurrency or capacity is reached."""

    status = 429
    code = "rate_limit_exceeded"


class HeadersTooLarge(ProxyError):
    """The headers of the request are too long or too many."""

    status = 431
    code = "headers_too_large"
    retryable = False


class EngineFailed(ProxyError):
    """The engine crashed, or its answer is inconsistent (such as fewer logprobs than tokens)."""

    status = 502
    code = "engine_failed"


class UpstreamFailed(ProxyError):
    """An external model refuses the request, fails, is not reached, or does not answer as its API does.

    Its status is 400, 404, 413, 422 or 429 if the external model answers so, 504 if it is silent for too long, and else
    502. The message has no address and no key.
    """

    status = 502
    code = "upstream_failed"

    def __init__(self, message: str, *, status: int = 502, retry_after_s: float | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.answer_with(status)

    def answer_with(self, status: int) -> None:
        """Set the status."""
        self.status, self.retryable = status, status >= 500 or status == 429


class EngineUnavailable(ProxyError):
    """The engine is paused, shutting down or not reachable."""

    status = 503
    code = "engine_unavailable"


class EngineLost(EngineUnavailable):
    """The inference server that sampled this reply is lost. Another server may continue from its tokens.

    `ran`: the server may have run the request; False if it was lost before.
    """

    code = "engine_lost"

    def __init__(self, message: str, *, ran: bool = True) -> None:
        super().__init__(message)
        self.ran = ran


class EngineBusy(EngineLost):
    """The inference server refuses the request because it has too many. This is not a failure of the server."""

    code = "engine_busy"


class EngineIncapable(EngineUnavailable):
    """This engine lacks the operation. Retrying does not help; another engine or flag may."""

    status = 501
    code = "engine_incapable"
    retryable = False


class StoreUnavailable(ProxyError):
    """The database failed a commit or a read."""

    status = 503
    code = "store_unavailable"


class ArchiveUnavailable(ProxyError):
    """A file of the archive cannot be read, written or deleted."""

    status = 503
    code = "archive_unavailable"


class TunnelUnavailable(ProxyError):
    """The tunnel of `--expose` has ended and is started again, so a new session would have no address."""

    status = 503
    code = "tunnel_unavailable"


class TooManyConnections(ProxyError):
    """`--max-connections`, or the limit of open files, is reached, and every connection is in use."""

    status = 503
    code = "too_many_connections"


class ScratchFull(ProxyError):
    """The temporary files of an export cannot be written."""

    status = 503
    code = "scratch_full"


class EngineTimeout(ProxyError):
    """The engine returned no token within `--engine-timeout-s`."""

    status = 504
    code = "timeout"


class ConfigurationError(Exception):
    """An invalid setting, folder or file that prevents the start. Its text is the one line that the user sees."""


def how_to_get(package: str) -> str:
    """Install instructions for an optional package, for the end of an error message.

    The one-file build cannot be extended.
    """
    if getattr(sys, "frozen", False):
        return f"the one-file build lacks it; use an installation in Python with {package}"
    return f"pip install {shlex.quote(package)}"
