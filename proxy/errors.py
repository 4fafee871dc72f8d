"""Every failure that a client can see is one of these classes; nothing here knows a wire format.

ProxyError                        status  code
├── InvalidRequest                400     invalid_request
│   ├── UnsupportedParameter      400     unsupported_parameter
│   ├── ContextLengthExceeded     400     context_length_exceeded
│   └── KeyInUse                  400     key_in_use
├── Unauthorized                  401     invalid_api_key
├── Forbidden                     403     forbidden
│   ├── SessionClosed             403     session_closed
│   └── LimitReached              403     session_limit_reached
├── NotFound                      404     not_found
│   ├── ModelNotFound             404     model_not_found
│   ├── SessionNotFound           404     session_not_found
│   └── PreviousResponseNotFound  404     previous_response_not_found
├── MethodNotAllowed              405     method_not_allowed
├── BodyTooLarge                  413     body_too_large
├── TooManyRequests               429     rate_limit_exceeded
├── EngineFailed                  502     engine_failed
├── EngineUnavailable             503     engine_unavailable
│   ├── EngineLost                503     engine_lost
│   └── EngineIncapable           501     engine_incapable
├── StoreUnavailable              503     store_unavailable
└── EngineTimeout                 504     timeout
(ProxyError itself is 500, internal_error. ConfigurationError is for the command line: it ends the process.)
"""

from __future__ import annotations

from typing import ClassVar


class ProxyError(Exception):
    """A failure with an HTTP status, a stable code, and whether trying again can help.

    `param` names the field at fault; `retry_after_s` becomes the `retry-after` header (never above 30: SDKs give up).
    """

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(ProxyError):
    """The body, a field, a header or the address is wrong."""

    status = 400
    code = "invalid_request"
    retryable = False


class UnsupportedParameter(InvalidRequest):
    """A field that is known but that this server or this engine cannot honour."""

    code = "unsupported_parameter"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or prompt plus `max_tokens`, does not fit the context window; lengths are in tokens."""

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, context_tokens: int, max_tokens: int | None = None) -> None:
        self.prompt_tokens = prompt_tokens
        self.context_tokens = context_tokens
        self.max_tokens = max_tokens
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your messages resulted in "
            f"{prompt_tokens} tokens. Please reduce the length of the messages.",
            param="messages",
        )


class KeyInUse(InvalidRequest):
    """A chosen session key still belongs to a live session."""

    code = "key_in_use"


class Unauthorized(ProxyError):
    """No key, or one that nobody here gave out."""

    status = 401
    code = "invalid_api_key"
    retryable = False


class Forbidden(ProxyError):
    """The key is known but may not do this."""

    status = 403
    code = "forbidden"
    retryable = False


class SessionClosed(Forbidden):
    """The session is sealed. Not 409: SDKs retry that."""

    code = "session_closed"


class LimitReached(Forbidden):
    """A limit that the session was started with (turns, tokens, deadline) is used up."""

    code = "session_limit_reached"


class NotFound(ProxyError):
    """No such path, interaction or model."""

    status = 404
    code = "not_found"
    retryable = False


class ModelNotFound(NotFound):
    """`GET /v1/models/{id}` for a model that is not served."""

    code = "model_not_found"


class SessionNotFound(NotFound):
    """The addressed session does not exist."""

    code = "session_not_found"


class PreviousResponseNotFound(NotFound):
    """`previous_response_id` names no complete response of this session."""

    code = "previous_response_not_found"


class MethodNotAllowed(ProxyError):
    """The path exists with another HTTP method."""

    status = 405
    code = "method_not_allowed"
    retryable = False


class BodyTooLarge(ProxyError):
    """The body is longer than the limit; it was not read beyond it."""

    status = 413
    code = "body_too_large"
    retryable = False


class TooManyRequests(ProxyError):
    """A queue or capacity limit is reached."""

    status = 429
    code = "rate_limit_exceeded"


class EngineFailed(ProxyError):
    """The engine crashed, or answered inconsistently (fewer logprobs than tokens)."""

    status = 502
    code = "engine_failed"


class EngineUnavailable(ProxyError):
    """The engine is paused, draining or not up."""

    status = 503
    code = "engine_unavailable"


class EngineLost(EngineUnavailable):
    """The server that sampled this reply is gone; another may go on where it stopped."""

    code = "engine_lost"


class EngineIncapable(EngineUnavailable):
    """This engine has no such thing, now or later: asking again does not help, another engine or flag does."""

    status = 501
    code = "engine_incapable"
    retryable = False


class StoreUnavailable(ProxyError):
    """The database refused a commit or a read."""

    status = 503
    code = "store_unavailable"


class EngineTimeout(ProxyError):
    """The engine gave no token in time."""

    status = 504
    code = "timeout"


class ConfigurationError(Exception):
    """A setting, folder or file with which the server cannot start; its text is the one line that the user sees."""
