"""`POST [/{session}]/v1/tokenize`, `/v1/detokenize` and `/v1/parse`. They record nothing and sample nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request

from proxy.api.bodies import Bodies
from proxy.api.headers import headers_of, hint_in, key_in
from proxy.api.http import TOO_DEEP, JsonResponse
from proxy.api.known_fields import check_given
from proxy.api.replies import ignored_header
from proxy.protocols.chat.tokenize import (
    OF_CONTINUE_FROM,
    OF_PARSE,
    ParsedTokenize,
    parse_detokenize,
    parse_parse,
    parse_reply,
    parse_tokenize,
    tokenize_reply,
)
from proxy.protocols.fields import optional_text
from proxy.protocols.hosted_tools import check_hosted
from proxy.resources.senders import Sender
from proxy.sessions.access import Access, Caller
from proxy.turns.route import EngineRoute, Routes
from proxy.types import Api, Ids, Parsing
from tokengrove.errors import InvalidRequest

_T = TypeVar("_T")


class TokenizeEndpoints:
    """The three endpoints. Messages are rendered like a turn of the session.

    In a known conversation, the ids continue the ids of the session, including sampled tokens. The administrator needs
    no session.
    """

    def __init__(self, access: Access, routes: Routes, bodies: Bodies) -> None:
        self._access, self._routes, self._bodies = access, routes, bodies

    async def tokenize(self, request: Request) -> JsonResponse:
        """The ids of a chat or a text, or given ids followed by the ids of further messages."""
        async with self._read(request, _parse_tokenize) as (caller, sender, wanted):
            try:
                ids, route = await self._ids(caller, sender, wanted)
            except RecursionError:
                raise InvalidRequest(TOO_DEEP, param="body") from None
            most, allowed = route.gate.info().context_length, route.settings.max_context_tokens
            reply = JsonResponse(tokenize_reply(ids, most if allowed is None else min(most, allowed)))
            reply.raw_headers += ignored_header(wanted.request.dropped)
            return reply

    async def _ids(self, caller: Caller, sender: Sender, wanted: ParsedTokenize) -> tuple[Ids, EngineRoute]:
        """The ids, and the route whose tokenizer made them."""
        asked, known, prompt = wanted
        asked.sender = sender
        session = await self._access.resolve_if_named(caller)
        self._routes.assign(asked, None if session is None else session.record)
        route = self._routes.engine(asked.route)
        check_hosted(asked.dropped, route.settings.hosted_tools)
        tokens = route.tokens
        if known is not None:
            return await tokens.continued(asked, known, sender, generation_prompt=prompt), route
        if asked.text is not None:
            return await tokens.encode(asked.text, sender), route
        if session is None and self._access.open_server:
            session = await self._access.resolve(caller)
        if session is None:
            return await tokens.render(asked, sender, generation_prompt=prompt), route
        return (await tokens.prompt(session, asked, generation_prompt=prompt)).joined, route

    async def parse(self, request: Request) -> JsonResponse:
        """The message that sampled ids parse to."""
        async with self._read(request, _parse_parse) as (caller, sender, (model, ids, wanted)):
            session = await self._access.resolve_if_named(caller)
            tokens = self._routes.named(model, session).tokens
            if session is not None and wanted.tools and wanted.tool_parser is None:
                wanted = wanted._replace(tool_parser=session.record.turn_options.get("tool_parser"))
            return JsonResponse(parse_reply(*await tokens.parse(ids, wanted, sender)))

    async def detokenize(self, request: Request) -> JsonResponse:
        """The text of ids, including special tokens unless the body excludes them."""
        async with self._read(request, _with_model) as (caller, sender, (model, body)):
            route = self._routes.named(model, await self._access.resolve_if_named(caller))
            ids, special = parse_detokenize(body, route.renderer.vocab_size)
            return JsonResponse({"prompt": await route.tokens.decode(ids, sender, special=special)})

    @asynccontextmanager
    async def _read(
        self, request: Request, parse: Callable[[Mapping[str, Any]], _T]
    ) -> AsyncIterator[tuple[Caller, Sender, _T]]:
        """Read the body, and keep its share of the budget in the block. Unauthorized bodies are not read."""
        headers, path = headers_of(request.scope), request.path_params.get("session")
        key = key_in(headers)
        if not self._access.open_server:
            await self._access.resolve_if_named(Caller(path, key))
        with self._bodies.upload(request.scope, headers, request.receive) as upload:
            sent = await upload.read()
            body, size = await upload.decode_turn_object(sent)
            caller = Caller(path, key, None if path else hint_in(headers, body))
            if self._bodies.images is not None:
                session = await self._access.resolve_if_named(caller)
                await upload.read_images(body, size, Api.CHAT, session, sizes_only=True)
            yield caller, upload.sender, await upload.do(size, parse, body)


def _parse_tokenize(body: Mapping[str, Any]) -> ParsedTokenize:
    if isinstance(known := body.get("continue_from"), dict):
        check_given(known, OF_CONTINUE_FROM, "continue_from.")
    return parse_tokenize(body)


def _parse_parse(body: Mapping[str, Any]) -> tuple[str, Ids, Parsing]:
    check_given(body, OF_PARSE)
    return optional_text(body, "model") or "", *parse_parse(body)


def _with_model(body: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    return optional_text(body, "model") or "", body
