"""`/mailbox/...`: an external process acts as the engine. It fetches requests and delivers their answers."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request

from proxy.api.bodies import Bodies
from proxy.api.connections import while_connected
from proxy.api.delivery import DeliveredMessage, parse_delivery
from proxy.api.http import JsonResponse, key_of
from proxy.api.known_fields import check_given
from proxy.api.long_polls import LongPolls
from proxy.engine.mailbox import Letter, Mailbox
from proxy.engine.requests import GenerateRequest
from proxy.protocols.answer_format import format_fields
from proxy.protocols.fields import optional_float, optional_int, optional_text
from proxy.rendering import Renderer
from proxy.sessions.access import Access
from proxy.sessions.end_waiter import EndWaiter
from proxy.sessions.registry import Registry
from proxy.telemetry.http_request import request_of
from proxy.trajectory.conversation import message_dict, tool_dict
from proxy.types import TurnRequest
from tokengrove.errors import EngineIncapable, InvalidRequest, brief
from tokengrove.options.session import SessionStatus

_MAX_WAIT_S = 600.0


class MailboxEndpoints:
    """`/mailbox/next` and `/mailbox/deliver`."""

    def __init__(
        self,
        access: Access,
        mailbox: Mailbox | None,
        registry: Registry,
        waiter: EndWaiter,
        bodies: Bodies,
        polls: LongPolls,
        renderer: Renderer,
    ) -> None:
        """`mailbox`: the engine; None if the engine is not a mailbox. `renderer`: writes delivered messages."""
        self._access, self._engine, self._registry, self._bodies = access, mailbox, registry, bodies
        self._waiter, self._polls, self._renderer = waiter, polls, renderer

    async def next(self, request: Request) -> JsonResponse:
        """Return the oldest waiting request, of `session_id` if given.

        `{"status": "empty"}` if none arrives for `wait_s` seconds; `{"status": "ended"}` if the session has ended or is
        past its deadline, so that it can send no more. `images`: whether to include the bytes of the request's images.
        """
        body = await self._body(request)
        check_given(body, ("session_id", "wait_s", "images"))
        with_bytes = _with_bytes(body)
        session_id = optional_text(body, "session_id")
        wait_s = optional_float(body, "wait_s", least=0.0, most=_MAX_WAIT_S) or 0.0
        session = await self._registry.get(session_id) if session_id is not None else None
        if session is not None:
            request_of(request.scope).enter(session.id, session.record.metadata)
        ended = session.ended if session is not None else None
        left_s = session.seconds_left() if session is not None else None
        wait_s = wait_s if left_s is None else min(wait_s, max(left_s, 0.0))
        waiting = self._polls.wait(self._mailbox().fetch(session_id, wait_s, ended))
        async with self._noticing_ends(session_id, wait_s):
            # A poll whose client has left must not take a request from another poll.
            letter = await while_connected(request.receive, waiting)
        if letter is not None:
            images = await _images_json(letter.request, with_bytes)
            return JsonResponse({"status": "request", **_letter_json(letter), "images": images})
        over = session_id is not None and await self._has_ended(session_id)
        return JsonResponse({"status": "ended" if over else "empty"})

    @asynccontextmanager
    async def _noticing_ends(self, session_id: str | None, wait_s: float) -> AsyncIterator[None]:
        """Watch the session during a poll, so that its `ended` is also set if it ends on another replica."""
        if session_id is None or not (wait_s and self._registry.shared):
            yield
            return
        watch = asyncio.create_task(self._waiter.wait_ended([session_id], wait_s))
        try:
            yield
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)

    async def _has_ended(self, session_id: str) -> bool:
        """Whether a session takes no more turns. Reads it again, because another replica may have ended it."""
        session = await self._registry.get(session_id)
        left_s = session.seconds_left()
        return session.record.status is not SessionStatus.ACTIVE or (left_s is not None and left_s <= 0)

    async def deliver(self, request: Request) -> JsonResponse:
        """Answer the request named by `interaction_id`, or by `session_id` and `turn`."""
        body = await self._body(request)
        answer = parse_delivery(body)
        name, mailbox = self._name(body), self._mailbox()
        if isinstance(answer, DeliveredMessage):
            answer = answer.written(self._renderer, mailbox.request(name))
        mailbox.deliver(name, answer)
        return JsonResponse(_names(name))

    def _name(self, body: Mapping[str, Any]) -> str:
        """The id of the request to answer. Fields that name different requests are refused."""
        by_id, by_older_name = (optional_text(body, field) for field in _names(""))
        session_id, turn = optional_text(body, "session_id"), optional_int(body, "turn", least=0)
        name = by_id or by_older_name
        if name is not None:
            waiting = self._mailbox().request(name)
            _check_same(name, "request_id", by_older_name, name)
            _check_same(name, "session_id", session_id, waiting.session_id)
            _check_same(name, "turn", turn, waiting.turn_number)
            return name
        if session_id is None or turn is None:
            raise InvalidRequest(
                "give 'interaction_id', or 'session_id' and 'turn', to name the request", param="interaction_id"
            )
        return self._mailbox().find(session_id, turn)

    async def _body(self, request: Request) -> Mapping[str, Any]:
        self._access.check_admin(key_of(request))
        return await self._bodies.read_object(request)

    def _mailbox(self) -> Mailbox:
        if self._engine is None:
            raise EngineIncapable("this engine has no mailbox; start Tokengrove with --engine mailbox")
        return self._engine


def _check_same(name: str, field: str, given: str | int | None, own: str | int | None) -> None:
    """Raise InvalidRequest if a given field does not match the request `name`, whose value for it is `own`."""
    if given is not None and given != own:
        raise InvalidRequest(
            f"{brief(field)} is {brief(given)}, but that of request {name} is {brief(own)}", param=field
        )


def _names(request_id: str) -> dict[str, str]:
    """The id of a request, which is the id of the interaction; `request_id` is its older name."""
    return {"interaction_id": request_id, "request_id": request_id}


def _letter_json(letter: Letter) -> dict[str, Any]:
    request, turn = letter.request, letter.request.turn
    return {
        **_names(request.request_id),
        "session_id": request.session_id,
        "turn": request.turn_number,
        "api": turn.api.value if turn is not None else None,
        "model": turn.model if turn is not None else None,
        "messages": [message_dict(message) for message in turn.messages] if turn is not None else [],
        "prefill": turn.prefill.content if turn is not None and turn.prefill is not None else None,
        "tools": [tool_dict(tool) for tool in turn.tools] if turn is not None else [],
        "tool_choice": _tool_choice(letter),
        "sampling": request.sampling.to_json(),
        "asked": _asked(turn) if turn is not None else {},
        "input_ids": request.input_ids.tolist(),
        "stop_token_ids": list(request.stop_token_ids),
    }


def _with_bytes(body: Mapping[str, Any]) -> bool:
    asked = optional_text(body, "images") or "references"
    if asked not in ("references", "bytes"):
        raise InvalidRequest("'images' must be 'references' or 'bytes'", param="images")
    return asked == "bytes"


async def _images_json(request: GenerateRequest, with_bytes: bool) -> list[dict[str, Any]]:
    """The images of the prompt, in order. `with_bytes`: include the original bytes of each, in base64.

    They cannot be read elsewhere yet: the images of a turn are stored with its answer.
    """
    if request.images is None:
        return []
    placed = [image.to_json() for image in request.images.placed]
    if not with_bytes:
        return placed
    files = await request.images.read()
    encoded = await asyncio.to_thread(lambda: [b64encode(file.data).decode() for file in files])
    return [
        {**image, "media_type": file.media_type, "data": data}
        for image, file, data in zip(placed, files, encoded, strict=True)
    ]


def _asked(turn: TurnRequest) -> dict[str, Any]:
    """The other fields that the client set, besides messages and tools, as fields of a chat completion."""
    asked: dict[str, Any] = {name: _field(name, getattr(turn.sampling, name)) for name in sorted(turn.given)}
    if turn.template_options:
        asked["chat_template_kwargs"] = dict(turn.template_options)
    if not turn.parallel_tool_calls:
        asked["parallel_tool_calls"] = False
    if turn.response_format is not None:
        asked |= format_fields(turn.response_format)
    return asked


def _field(name: str, value: Any) -> Any:
    if name == "logit_bias":
        return {str(token): bias for token, bias in value}
    return list(value) if isinstance(value, tuple) else value


def _tool_choice(letter: Letter) -> dict[str, Any] | None:
    turn = letter.request.turn
    return None if turn is None else {"mode": turn.tool_choice.mode.value, "name": turn.tool_choice.name}
