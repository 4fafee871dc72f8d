"""What goes wrong with an external model, before it is told to anyone: it may quote the model's own words."""

from __future__ import annotations

from typing import Any

import orjson

PASSED_ON = (400, 404, 413, 422, 429)
"""The statuses of an external model that the client gets, too: they are about its request."""

BAD, LATE = 502, 504
_LATE = (408, 504)
_OF_KEYS = (401, 403)
_STATUS = {
    **{"invalid_request_error": 400, "invalid_prompt": 400, "context_length_exceeded": 400},
    **{"authentication_error": 401, "invalid_api_key": 401, "permission_error": 403},
    **{"not_found_error": 404, "model_not_found": 404, "request_too_large": 413},
    **{"rate_limit_error": 429, "rate_limit_exceeded": 429, "timeout_error": 504},
}
"""The statuses of errors in the middle of a stream, by their `code` or `type`."""


class Failure(Exception):
    """Why there is no answer: a `reason` in this server's words, and the external model's own `text`, of any length.

    `hidden`: the text is that of a library, which may name addresses; agents do not see it.
    """

    def __init__(
        self,
        reason: str,
        text: str = "",
        *,
        status: int = BAD,
        retry_after_s: float | None = None,
        hidden: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.text, self.status, self.retry_after_s = reason, text, status, retry_after_s
        self.hidden = hidden


def refused(status: int, text: str, retry_after_s: float | None = None) -> Failure:
    """The failure of an answer with a status that is not 200. `text`: its message.

    A refused key is the operator's, not the client's: the text, which may quote a part of it, is not passed on.
    """
    if status in _OF_KEYS:
        return Failure("the external model refuses the key that the operator of this server has for it")
    if 300 <= status < 400:
        return Failure("the external model redirects the request, which is never followed")
    if status in PASSED_ON:
        reason = f"the external model refuses the request with {status}"
        return Failure(reason, text, status=status, retry_after_s=retry_after_s)
    reason = f"the external model fails with {status}"
    return Failure(reason, text, status=LATE if status in _LATE else BAD, retry_after_s=retry_after_s)


def told(error: Any) -> Failure:
    """The failure that an event of a stream tells."""
    names = (error.get("code"), error.get("type")) if isinstance(error, dict) else ()
    found = next((_STATUS[name] for name in names if isinstance(name, str) and name in _STATUS), None)
    if found is None:
        found = next((name for name in names if type(name) is int and 400 <= name < 600), None)
    if found is not None:
        return refused(found, message_of(error))
    return Failure("the external model ends its answer with an error", message_of(error))


def message_of(value: Any) -> str:
    """The message in the JSON of an error, in the forms that servers give it."""
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(name):
            value = value[name]
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):
        return ""
