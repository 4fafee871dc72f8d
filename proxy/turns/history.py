"""The history that a Responses request refers to by id: `previous_response_id` and item references.

Both refer to interactions of the request's own session. The resolved request equals a request that has all messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter

from proxy.sessions.live_session import LiveSession
from proxy.trajectory.cache import Node
from proxy.trajectory.echoes import compare
from proxy.trajectory.matching import Identity
from proxy.trajectory.purpose import purpose_of_prompt
from proxy.types import INSTRUCTIONS, ITEM_REFERENCE, Api, Message, Role, Tool, ToolCall, TurnRequest
from tokengrove.errors import PreviousResponseNotFound, brief

_name_of = attrgetter("name")


def with_history(session: LiveSession, request: TurnRequest) -> TurnRequest:
    """Return the request with its whole conversation, with `previous_response_id` and item references resolved.

    As in the Responses API, `instructions` are not carried over to the next response; messages are. Raises
    PreviousResponseNotFound.
    """
    if request.api is not Api.RESPONSES:
        return request
    if request.previous_id is None and ITEM_REFERENCE not in map(_name_of, request.messages):
        return request
    messages = tuple([found for message in request.messages for found in _dereferenced(session, message)])
    if request.previous_id is not None:
        node = _find(session, request.previous_id, "previous_response_id")
        lead = 1 if messages and _is_instructions(messages[0]) else 0
        history = session.cache.conversation(node)
        first = 1 if _is_instructions(history[0]) else 0  # they can only be the first message of a conversation
        sent = _without_repeat(node.interaction.output, messages[lead:], request.tools)
        messages = (*messages[:lead], *history[first:], *sent)
    return with_messages(request, messages)


def with_messages(request: TurnRequest, messages: tuple[Message, ...]) -> TurnRequest:
    """Return the request with other messages, and with the purpose that they state if it has none."""
    return replace(request, messages=messages, purpose=request.purpose or purpose_of_prompt(messages))


def identified(session: LiveSession, request: TurnRequest, *, keep: bool = True) -> Identity:
    """Return the identity of a request. Its messages are replaced by equal messages of an earlier request, if any."""
    request.messages, identity = session.cache.recent.identify(
        request.messages, request.tools, request.template_options, request.route, keep=keep
    )
    return identity


def _without_repeat(answer: Message, sent: tuple[Message, ...], tools: Sequence[Tool]) -> tuple[Message, ...]:
    """Return the new messages of a request without an echo of the previous answer at their beginning.

    Some clients send the answer and also its id.
    """
    end = next((at for at, message in enumerate(sent) if message.role is not Role.ASSISTANT), len(sent))
    if end == 0:
        return sent
    schemas = {tool.name: tool.parameters for tool in tools}
    return sent if compare([answer], sent[:end], schemas) is None else sent[end:]


def _dereferenced(session: LiveSession, message: Message) -> Sequence[Message]:
    """Return the answer that an item reference names, or any other message unchanged.

    Content and calls that the client sent in full with the reference replace the stored ones. Calls of other answers
    follow in a message of their own.
    """
    if message.name != ITEM_REFERENCE or message.origin is None:
        return (message,)
    node = _find(session, message.origin, "input")
    ours = node.interaction.output
    callers = [session.cache.caller(call.id) or node for call in message.tool_calls]
    sent = [(call, caller is node) for call, caller in zip(message.tool_calls, callers, strict=True)]
    calls = _sent_calls(ours, tuple(call for call, own in sent if own))
    others = tuple(call for call, own in sent if not own)
    answer = ours._replace(content=message.content or ours.content, tool_calls=calls, origin=message.origin)
    return (answer, Message(Role.ASSISTANT, tool_calls=others)) if others else (answer,)


def _sent_calls(ours: Message, sent: tuple[ToolCall, ...]) -> tuple[ToolCall, ...]:
    """Return our calls as the client sent them, and our own for calls that it left out.

    If the client sent a call with an unknown id, only the calls that it sent are returned.
    """
    by_id = {call.id: call for call in sent}
    known = {call.id for call in ours.tool_calls}
    return tuple(by_id.get(call.id, call) for call in ours.tool_calls) if known.issuperset(by_id) else sent


def _find(session: LiveSession, interaction_id: str, param: str) -> Node:
    node = session.cache.nodes.get(interaction_id)
    if node is None or node.interaction.seq < 0:
        raise PreviousResponseNotFound(
            f"there is no response {brief(interaction_id)} in session {brief(session.id)}", param=param
        )
    return node


def _is_instructions(message: Message) -> bool:
    return message.role is Role.SYSTEM and message.name == INSTRUCTIONS
