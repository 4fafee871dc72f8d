"""`POST [/{session}]/v1/generate`: token ids in and out. In a session it is a turn; else nothing is recorded."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from proxy.api.bodies import Bodies, Upload
from proxy.api.client_hints import add_headers
from proxy.api.connections import while_connected
from proxy.api.forwarding import Forwarded, Forwarding
from proxy.api.headers import headers_of
from proxy.api.http import JsonResponse, caller_of
from proxy.api.neutral_errors import OUTSIDE
from proxy.api.replies import UnaryReply, begin_turns, ignored_header
from proxy.api.turn_endpoints import EPISODE
from proxy.engine.requests import GenerateRequest
from proxy.prompt_ids import PromptIds
from proxy.protocols.fields import check_text
from proxy.protocols.generate import GenerateProtocol, generation_reply, parse_request_id, prompt_field
from proxy.sessions.access import Access, agent_in
from proxy.sessions.episodes import HEADER, check_label
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.telemetry.http_request import HttpRequest, request_of
from proxy.turns.defaults import check_capabilities, stop_tokens
from proxy.turns.generation import sample
from proxy.turns.route import EngineRoute
from proxy.turns.spans import trace_request, trace_turns
from proxy.turns.turns import Turns
from proxy.types import ImageFile, SamplingParams, TurnRequest
from proxy.workers.attempt_table import RunsElsewhere
from tokengrove.errors import SHUTTING_DOWN, EngineUnavailable, InvalidRequest, SessionClosed, UnsupportedParameter

if TYPE_CHECKING:
    from tokengrove.spans import Tracing

_SAMPLING = frozenset(SamplingParams._fields)
# Prefix of the placement key of requests without a session. No session id contains a space, so no key is equal to one.
_AFFINITY = "generate "


class GenerateEndpoint:
    """The endpoint, with and without a session."""

    def __init__(
        self,
        access: Access,
        turns: Turns,
        bodies: Bodies,
        forwarding: Forwarding | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """`forwarding`: to other workers; None without other workers. `tracing`: None if no traces are made."""
        self._bodies = bodies
        self._access = access
        self._turns, self._routes = turns, turns.routes
        self._protocol, self._forwarding, self._tracing = GenerateProtocol(), forwarding, tracing

    async def generate(self, request: Request) -> UnaryReply | JsonResponse | Forwarded:
        """Sample from token ids: as a turn of the session if one is named."""
        record = request_of(request.scope)
        if self._tracing is not None:
            record.begin_trace(self._tracing, request.scope)
        headers, caller = headers_of(request.scope), caller_of(request)
        if EPISODE in headers:
            caller = caller._replace(episode=check_text(headers[EPISODE], HEADER))
        session = await self._access.resolve_if_named(caller)
        if session is None:
            check_label(caller.episode, None)
        with self._bodies.upload(request.scope, headers, request.receive) as upload:
            sent = await upload.read()
            read = time.monotonic()
            body, size = await upload.decode_turn_object(sent)
            files = await upload.read_images(body, size, self._protocol.api, session)
            while True:
                if session is not None:
                    record.enter(session.id, session.record.metadata)
                try:
                    return await self._begin_in(session, request, record, upload, body, sent, size, files, read)
                except SessionClosed as closed:
                    assert session is not None  # without one, nothing is closed
                    session = await self._access.after(session, closed, caller)

    async def _begin_in(
        self,
        session: LiveSession | None,
        request: Request,
        record: HttpRequest,
        upload: Upload,
        body: Mapping[str, Any],
        sent: bytes,
        size: int,
        files: dict[str, ImageFile],
        read: float,
    ) -> UnaryReply | JsonResponse | Forwarded:
        """Begin in a session, or without one. Raises SessionClosed if the session takes no turn by now."""
        asked, affinity = await upload.do(size, self._protocol.parse, body), parse_request_id(body)
        asked.files = files
        asked.sender = upload.sender if session is None else upload.sender._replace(name=session.id)
        agent = None if session is None else agent_in(request.path_params.get("session"), session.id)
        self._routes.assign(asked, None if session is None else session.record)
        add_headers(asked, headers_of(request.scope), agent)
        asked.request_id, asked.outside = record.client_id, OUTSIDE in request.scope
        asked.timeline.received, asked.timeline.read = record.started, read
        if record.trace is not None:
            trace_request(record.trace, asked)
        with _errors_named(body):
            if session is None:
                upload.release()  # of the body only the ids are kept, for the engine
                sent = b""
                route = self._routes.engine(asked.route)
                wanted = self._generate_request(asked, affinity, route)
                if asked.images or route.renderer.has_vision:
                    ids, wanted.images = await route.tokens.seen(asked, asked.sender)
                    wanted.prompt = PromptIds(ids)
                wanted.adapter = route.begin(None, asked.pinned)
                try:
                    return await self._unrecorded(request, asked, wanted, route)
                finally:
                    route.adapters.end(wanted.adapter)
            try:
                turns = await begin_turns(request.receive, self._turns, session, asked, self._protocol)
            except RunsElsewhere as found:
                assert self._forwarding is not None
                return self._forwarding.to(found.worker, sent, upload)
        if record.trace is not None:
            trace_turns(record.trace, asked, turns)
        return UnaryReply(self._turns, asked, turns, self._protocol)

    def _generate_request(self, asked: TurnRequest, affinity: str | None, route: EngineRoute) -> GenerateRequest:
        assert asked.input_ids is not None
        check_capabilities(asked, asked.sampling, route.gate.info(), strict=route.settings.strict_sampling)
        if asked.sampling.stop:
            raise UnsupportedParameter(
                "'stop' needs a session, because without one no text is decoded; use 'stop_token_ids'", param="stop"
            )
        return GenerateRequest(
            request_id=self._protocol.new_id(),
            prompt=PromptIds(asked.input_ids),
            sampling=_within_limit(asked.sampling._replace(ignore_eos=False), route.settings),
            stop_token_ids=stop_tokens(asked, route.renderer.stop_token_ids),
            session_id=_AFFINITY + affinity if affinity else "",
            whole=True,
            timeline=asked.timeline,
        )

    async def _unrecorded(
        self, request: Request, asked: TurnRequest, wanted: GenerateRequest, route: EngineRoute
    ) -> JsonResponse:
        """Sample outside of any session. If the client leaves, the engine stops and ClientDisconnect is raised."""
        work = sample(route.gate, wanted, route.settings.max_context_tokens)
        sampling = self._turns.running.run_unrecorded(asked, work)
        try:
            done = await while_connected(request.receive, sampling)
        except asyncio.CancelledError:
            if not sampling.cancelled():
                raise
            raise EngineUnavailable(SHUTTING_DOWN) from None
        prompt, logprobs = len(wanted.prompt), done.logprobs if done.sampled else None
        reply = generation_reply(
            done.ids, logprobs, done.versions, done.finish, prompt, done.cached_tokens, done.logprobs_of
        )
        response = JsonResponse({"id": wanted.request_id, **reply})
        response.raw_headers += ignored_header(asked.dropped)
        return response


def _within_limit(sampling: SamplingParams, settings: Settings) -> SamplingParams:
    """Apply `--max-tokens-per-turn`, which also applies without a session."""
    limits = [n for n in (sampling.max_tokens, settings.max_tokens_per_turn) if n is not None]
    return sampling._replace(max_tokens=min(limits, default=None))


@contextmanager
def _errors_named(body: Mapping[str, Any]) -> Iterator[None]:
    """Replace the field of an InvalidRequest with its name in this endpoint, for prompts and sampling parameters."""
    try:
        yield
    except InvalidRequest as error:
        if error.param in ("messages", "input_ids"):
            error.param = prompt_field(body)
        elif error.param in _SAMPLING:
            error.param = f"sampling_params.{error.param}"
        raise
