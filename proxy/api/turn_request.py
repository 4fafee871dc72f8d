"""The request of a stored turn, rebuilt in the form of its API: a request for the same prompt.

The rebuilt request is parsed again, so that `lacks` names everything that the API or the store could not keep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.api.session_json import quoted
from proxy.images.data_urls import data_url
from proxy.images.image_pool import ReadImages
from proxy.protocols.google.request_body import content_path
from proxy.protocols.image_sources import with_data, written_images
from proxy.protocols.wire_protocol import WireProtocol
from proxy.trajectory.conversation import conversation_above, root
from proxy.trajectory.matching import canonical_arguments
from proxy.trajectory.tree import Branch, build_tree, images_of, token_ids
from proxy.turns.reply_options import request_of
from proxy.turns.route import EngineRoute, Routes
from proxy.types import Api, Ids, ImagePart, Interaction, Message, SessionRecord, ToolChoiceMode, TurnRequest
from tokengrove.errors import ProxyError

PATHS: Mapping[Api, str] = {
    Api.CHAT: "/v1/chat/completions",
    Api.RESPONSES: "/v1/responses",
    Api.MESSAGES: "/v1/messages",
    Api.GENERATE: "/v1/generate",
    Api.COMPLETIONS: "/v1/completions",
}
_OF_IDS = (Api.GENERATE, Api.COMPLETIONS)


class Requests:
    """Writes requests in the form of each API. `protocols`: all protocols of turns."""

    def __init__(self, routes: Routes, protocols: Iterable[WireProtocol], read_images: ReadImages) -> None:
        self._routes, self._read_images = routes, read_images
        self._protocols = {protocol.api: protocol for protocol in protocols}

    async def request(
        self, record: SessionRecord, interactions: Sequence[Interaction], turn: Interaction
    ) -> dict[str, Any]:
        """The path and body of a request for one choice like `turn`. `interactions`: all of its session.

        `lacks`: names of what the body cannot reproduce. `same_elsewhere`: whether the request gives the same prompt
        ids in a new session. Images are included as data URLs.
        """
        written = await asyncio.to_thread(self._written, record, interactions, turn)
        if digests := {image.digest for image in written_images(written["body"])}:
            files = {file.digest: file for file in await self._read_images([*digests])}
            urls = {digest: data_url(files[digest]) if digest in files else "" for digest in digests}
            written["body"] = await asyncio.to_thread(with_data, written["body"], urls.__getitem__)
            if len(files) < len(digests):
                written["lacks"].append("images")
        return written

    def _written(self, record: SessionRecord, interactions: Sequence[Interaction], turn: Interaction) -> dict[str, Any]:
        """The request, with its images as they were parsed."""
        nodes = build_tree(interactions)
        node = nodes.get(turn.id) or Branch(turn, nodes.get(turn.parent_id or ""), 0)
        asked, ids = _asked(node, record), token_ids(node)[: turn.prompt_tokens]
        protocol = self._protocols[turn.api]
        if turn.api in _OF_IDS:
            images = [ImagePart(i.digest, 0, i.width, i.height, i.detail) for i in images_of(node)]
            asked = replace(asked, messages=(), input_ids=ids, images=tuple(images))
        body = protocol.body(asked)
        again = _parsed(protocol, body)
        return {
            "method": "POST",
            "path": f"/{quoted(turn.session_id)}{_path(asked)}",
            "body": body,
            "lacks": ["body"] if again is None else list(_lacking(turn, asked, again)),
            "same_elsewhere": again is not None and _prompt(again, self._routes.reader(turn.route)) == ids,
        }


def _path(asked: TurnRequest) -> str:
    """The path of a request, without its session."""
    return content_path(asked) if asked.api is Api.GOOGLE else PATHS[asked.api]


def _prompt(request: TurnRequest, route: EngineRoute | None) -> Ids | None:
    """The prompt ids of a request in a new session; None if the chat template refuses its messages."""
    if request.input_ids is not None:
        return request.input_ids
    if route is None:
        return Ids("i")
    try:
        ids = route.renderer.render(request.messages, request.tools, request.template_options)
        if request.prefill is None:
            return ids
        return route.renderer.prefilled(ids, request.prefill, request.tools, request.template_options)
    except ProxyError:
        return None


def _asked(node: Branch, record: SessionRecord) -> TurnRequest:
    """One choice of the turn's request. Defaults of the session are included, so that it is valid in any session."""
    turn, top = node.interaction, root(node).interaction
    asked = request_of(turn, (*conversation_above(node), *turn.new_messages), top.tools)
    own = frozenset(record.sampling)
    return replace(asked, template_options=top.template_options, n=1, previous_id=None, given=own)


def _parsed(protocol: WireProtocol, body: Mapping[str, Any]) -> TurnRequest | None:
    try:
        return protocol.parse(body)
    except ProxyError:
        return None


def _lacking(turn: Interaction, asked: TurnRequest, again: TurnRequest) -> Iterator[str]:
    """The names of the parts of `asked` that the rebuilt request `again` does not reproduce."""
    if _keys(asked.messages) != _keys(again.messages):
        yield "messages"
    if (asked.prefill and asked.prefill.content) != (again.prefill and again.prefill.content):
        yield "prefill"
    if [_unstrict(tool.to_json()) for tool in asked.tools] != [_unstrict(tool.to_json()) for tool in again.tools]:
        yield "tools"
    for name in ("tool_choice", "parallel_tool_calls", "template_options", "input_ids", "images"):
        if getattr(asked, name) != getattr(again, name):
            yield name
    for name, mine, theirs in zip(asked.sampling._fields, asked.sampling, again.sampling, strict=True):
        if mine != theirs:
            yield f"sampling.{name}"
    forced = asked.tool_choice.mode in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
    held = any(tool.pattern is not None for tool in again.tools)
    if turn.grammar and not forced and not held and again.response_format is None:
        yield "response_format"  # the store keeps no schema


def _unstrict(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool without `strict`, which is never part of a prompt."""
    return {name: value for name, value in tool.items() if name != "strict"}


def _keys(messages: Sequence[Message]) -> list[Any]:
    """The parts of messages that matter for a prompt. White space in arguments is ignored: one API sends no text."""
    return [
        (
            *(message.role, message.content, message.reasoning or None, message.tool_call_id, message.images),
            [(call.id, call.name, canonical_arguments(call.arguments)) for call in message.tool_calls],
        )
        for message in messages
    ]
