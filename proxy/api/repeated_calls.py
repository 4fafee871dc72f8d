"""Idempotent control calls: with the header `Idempotency-Key`, a repeated call is performed once.

The answer is stored with the changes of the call, so a repetition gets the same answer, from any server and after a
restart. The answer may contain new keys of a session. It is therefore encrypted with the caller's key and the
Idempotency-Key, of which the database has only hashes.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.requests import Request

from proxy.api.headers import headers_of, hint_in, key_in
from proxy.api.http import JsonResponse, decode_json, encode_json
from proxy.api.session_json import addressed
from proxy.store.answer import Answer
from proxy.store.answers import Answers
from tokengrove.errors import IdempotencyMismatch, InvalidRequest, ProxyError

_HEADER = b"idempotency-key"
_NAME = re.compile(r"[!-~]{1,255}")
_SALT_BYTES = 16


class RepeatableCall:
    """A call with an Idempotency-Key, identified by the caller's key and the request."""

    def __init__(self, request: Request, name: str, body: Mapping[str, Any]) -> None:
        headers = headers_of(request.scope)
        caller, named = key_in(headers) or "", hint_in(headers, None) or ""
        self._secret = f"{caller}\0{name}".encode(errors="surrogatepass")
        self.hash = hashlib.sha256(b"call\0" + self._secret).hexdigest()
        asked = f"{request.method}\0{request.scope['path']}\0{named}\0".encode(errors="surrogatepass")
        self.request_hash = hashlib.sha256(asked + orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).hexdigest()

    def answer(self, body: Mapping[str, Any], session_id: str | None = None) -> Answer:
        """The answer to store. `session_id`: the session that the header of the answer names."""
        salt = secrets.token_bytes(_SALT_BYTES)
        text = encode_json({"body": body, "session_id": session_id})
        return Answer(self.hash, self.request_hash, salt + self._sealed(salt, text))

    def opened(self, answer: Answer) -> JsonResponse:
        """The response of a stored answer. Raises IdempotencyMismatch if the request of the call was different."""
        if answer.request_hash != self.request_hash:
            raise IdempotencyMismatch(
                "this 'Idempotency-Key' belongs to an earlier call with another path, session or body; give each call "
                "a key of its own, and repeat a call as it was",
                param="Idempotency-Key",
            )
        salt, text = answer.answer[:_SALT_BYTES], answer.answer[_SALT_BYTES:]
        told = decode_json(self._sealed(salt, text))
        name = told["session_id"]
        return JsonResponse(told["body"], headers=None if name is None else addressed(name))

    def _sealed(self, salt: bytes, text: bytes) -> bytes:
        """The text XORed with a key stream from the secret. Applying it twice returns the text."""
        stream = hashlib.shake_256(b"seal\0" + salt + self._secret).digest(len(text))
        return (int.from_bytes(text, "big") ^ int.from_bytes(stream, "big")).to_bytes(len(text), "big")


Work = Callable[[RepeatableCall | None], Awaitable[JsonResponse]]
"""Performs a call and, if the call can be repeated, stores its answer with the changes."""


class RepeatedCalls:
    """Performs each call once."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers

    async def once(self, request: Request, body: Mapping[str, Any], work: Work) -> JsonResponse:
        """The stored answer of an equal call, or the answer of `work`.

        A refused call stores nothing. Raises InvalidRequest, IdempotencyMismatch and the errors of `work`.
        """
        name = name_of(request)
        if name is None:
            return await work(None)
        call = RepeatableCall(request, name, body)
        if (known := await self._answers.find(call.hash)) is not None:
            return call.opened(known)
        try:
            return await work(call)
        except ProxyError:
            # An equal call may have run meanwhile, so that this one finds its session started, ended or deleted.
            if (known := await self._answers.find(call.hash)) is not None:
                return call.opened(known)
            raise


def name_of(request: Request) -> str | None:
    """The Idempotency-Key of a request, None without one. Raises InvalidRequest."""
    name = headers_of(request.scope).get(_HEADER)
    if name is not None and not _NAME.fullmatch(name):
        raise InvalidRequest(
            "the header 'Idempotency-Key' must have 1 to 255 visible ASCII characters, such as those of a UUID",
            param="Idempotency-Key",
        )
    return name
