"""`POST [/{session}]/v1/tokenize` and `/v1/detokenize`. They record nothing and sample nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from proxy.api.bodies import Bodies
from proxy.api.headers import headers_of, hint_in, key_in
from proxy.api.http import TOO_DEEP, JsonResponse
from proxy.api.replies import ignored_header
from proxy.engine.gate import Gate
from proxy.errors import InvalidRequest
from proxy.protocols.chat.tokenize import parse_detokenize, parse_tokenize, tokenize_reply
from proxy.sessions.access import Access, Caller
from proxy.settings import Settings
from proxy.turns.turns import Turns

_T = TypeVar("_T")


class TokenizeEndpoints:
    """Both endpoints. Messages are rendered as a turn of the session would be: in a conversation that it knows, the ids
    continue those of the session, sampled tokens included."""

    def __init__(
        self, access: Access, turns: Turns, gate: Gate, vocab_size: int, settings: Settings, bodies: Bodies
    ) -> None:
        self._access, self._turns, self._gate, self._settings = access, turns, gate, settings
        self._vocab_size, self._bodies = vocab_size, bodies

    async def tokenize(self, request: Request) -> JsonResponse:
        """The ids of a chat or of a text."""
        async with self._read(request, parse_tokenize) as (caller, asked):
            if asked.text is not None:
                await self._access.resolve_if_named(caller)
                ids = await self._turns.encode(asked.text, _sender(caller))
            else:
                session = await self._access.resolve(caller)
                try:
                    ids = (await self._turns.prompt_ids(session, asked)).joined
                except RecursionError:
                    raise InvalidRequest(TOO_DEEP, param="body") from None
            most, allowed = self._gate.info().context_length, self._settings.max_context_tokens
            reply = JsonResponse(tokenize_reply(ids, most if allowed is None else min(most, allowed)))
            reply.raw_headers += ignored_header(asked.dropped)
            return reply

    async def detokenize(self, request: Request) -> JsonResponse:
        """The text of ids, special tokens included."""
        async with self._read(request, lambda body: parse_detokenize(body, self._vocab_size)) as (caller, ids):
            await self._access.resolve_if_named(caller)
            return JsonResponse({"prompt": await self._turns.decode(ids, _sender(caller))})

    @asynccontextmanager
    async def _read(
        self, request: Request, parse: Callable[[Mapping[str, Any]], _T]
    ) -> AsyncIterator[tuple[Caller, _T]]:
        """Read the body, and keep its share of all bodies in the block; a stranger's is not read."""
        headers, path = headers_of(request.scope), request.path_params.get("session")
        key = key_in(headers)
        if not self._access.open_server:
            await self._access.resolve_if_named(Caller(path, key))
        with self._bodies.upload(request.scope, headers, request.receive) as upload:
            sent = await upload.read()
            body = await upload.decode_object(sent)
            yield Caller(path, key, None if path else hint_in(headers, body)), await upload.do(len(sent), parse, body)


def _sender(caller: Caller) -> str:
    return caller.path or caller.key or caller.hint or ""
