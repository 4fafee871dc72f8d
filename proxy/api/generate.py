"""`POST [/{session}]/v1/generate`: in a session a turn like any other; without one, sampled and not recorded."""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request

from proxy.access import Access
from proxy.api.completions import with_headers
from proxy.api.http import JsonResponse, caller_of, read_object
from proxy.api.replies import UnaryReply, while_connected
from proxy.engine.gate import Gate
from proxy.errors import UnsupportedParameter
from proxy.generation import sample
from proxy.protocols.generate import GenerateProtocol, generation_reply, parse_request_id
from proxy.sampling import check_capabilities
from proxy.settings import Settings
from proxy.turns import Turns
from proxy.types import GenerateRequest, TurnRequest

# What requests without a session are kept together by; no session id has a space.
_AFFINITY = "generate "


class Generate:
    """The endpoint, with and without a session. `stop_token_ids` are the model's own."""

    def __init__(
        self, access: Access, turns: Turns, gate: Gate, settings: Settings, stop_token_ids: tuple[int, ...]
    ) -> None:
        self._access, self._turns, self._gate, self._settings = access, turns, gate, settings
        self._stop_token_ids = stop_token_ids
        self._protocol = GenerateProtocol()

    async def generate(self, request: Request) -> UnaryReply | JsonResponse:
        session = await self._access.resolve_if_named(caller_of(request))
        body = await read_object(request, self._settings.max_body_bytes)
        asked = with_headers(self._protocol.parse(body), request)
        if session is None:
            return await self._unrecorded(request, self._generate_request(asked, parse_request_id(body)))
        turns = await self._turns.begin(session, asked, new_id=self._protocol.new_id)
        return UnaryReply(request, self._turns, asked, turns, self._protocol)

    def _generate_request(self, asked: TurnRequest, affinity: str | None) -> GenerateRequest:
        assert asked.input_ids is not None
        check_capabilities(asked, asked.sampling, self._gate.info())
        if asked.sampling.stop:
            raise UnsupportedParameter("'stop' needs a session: without one no text is read", param="stop")
        own = self._stop_token_ids if asked.stop_token_ids is None else asked.stop_token_ids
        return GenerateRequest(
            request_id=self._protocol.new_id(),
            input_ids=asked.input_ids,
            sampling=replace(asked.sampling, ignore_eos=False),
            stop_token_ids=() if asked.sampling.ignore_eos else own,
            session_id=_AFFINITY + affinity if affinity else "",
        )

    async def _unrecorded(self, request: Request, wanted: GenerateRequest) -> JsonResponse:
        """Raises ClientDisconnect once nobody waits: the engine then stops."""
        done = await while_connected(request, sample(self._gate, wanted, self._settings.engine_timeout_s))
        versions, prompt = tuple(done.versions), len(wanted.input_ids)
        logprobs = done.logprobs if done.sampled else None
        reply = generation_reply(done.ids, logprobs, versions, done.finish, prompt, done.cached_tokens)
        return JsonResponse({"id": wanted.request_id, **reply})
