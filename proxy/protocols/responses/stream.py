"""Streams a response as events. The joined events give the final response. Each item is announced once.

Items are strictly sequential: an item ends when the next one begins, and the last one in `finish`, after the commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import orjson

from proxy.protocols import sse
from proxy.protocols.responses.response_object import (
    OutputItems,
    last_status,
    logprobs_json,
    response_end,
    response_head,
    summary_part,
    text_logprobs,
    text_part,
)
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob, ToolCallArguments, ToolCallStart
from proxy.types import Ids, ToolCall, TurnRequest
from tokengrove.errors import ContextLengthExceeded, ProxyError, TooManyRequests


class _Kind(StrEnum):
    REASONING = "reasoning"
    MESSAGE = "message"
    CALL = "function_call"


_PIECES: dict[_Kind, tuple[str, dict[str, Any]]] = {
    _Kind.REASONING: ("response.reasoning_summary_text.delta", {"summary_index": 0}),
    _Kind.MESSAGE: ("response.output_text.delta", {"content_index": 0, "logprobs": []}),
    _Kind.CALL: ("response.function_call_arguments.delta", {}),
}
"""The event for a piece of an item, and its fields beyond the common ones."""


@dataclass(slots=True)
class _OpenItem:
    """The item being streamed. `index` counts all items from 0, `number` counts items of its kind.

    `announced` False: a call of a tool that is no function. Its fields are known once it is whole, so its events follow
    then.
    `around`: the bytes of a piece's event before its sequence number, between that and its text, and after its text.
    """

    kind: _Kind
    index: int
    number: int
    id: str
    call_id: str = ""
    name: str = ""
    announced: bool = True
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    around: tuple[bytes, bytes, bytes] = (b"", b"", b"")

    @property
    def text(self) -> str:
        """The text so far; for a call, its arguments."""
        return "".join(self.parts)


class ResponseStream:
    """One streamed response: `response.created`, `response.in_progress`, the events of each item, then a terminal event
    with the whole response, then `[DONE]`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: TurnRequest, response_id: str, created: int, prompt_ids: Ids | None = None) -> None:
        self._head = response_head(request, response_id, created, prompt_ids)
        self._items = OutputItems.of(request, response_id)
        self._closed: list[dict[str, Any]] = []
        self._open: _OpenItem | None = None
        self._sequence = 0

    def start(self) -> bytes:
        events = ("response.created", "response.in_progress")
        return b"".join(self._event(name, response=self._head) for name in events)

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                kind, text = _Kind.MESSAGE, delta.text
            elif isinstance(delta, ReasoningDelta):
                kind, text = _Kind.REASONING, delta.text
            elif isinstance(delta, ToolCallArguments):
                kind, text = _Kind.CALL, delta.fragment
            else:
                if isinstance(delta, ToolCallStart):
                    out.append(self._begin(_Kind.CALL, delta.index, delta.id, delta.name))
                continue  # the next item or the end of the reply closes a call
            if not text:
                continue
            if self._open is None or self._open.kind is not kind:
                out.append(self._begin(kind))
            item = self._open
            assert item is not None
            item.parts.append(text)
            if not item.announced:
                continue
            head, middle, tail = item.around
            if isinstance(delta, TextDelta) and delta.logprobs:
                item.logprobs += delta.logprobs
                tail = tail.replace(b"[]", orjson.dumps(logprobs_json(delta.logprobs)))
            out.append(b"%b%d%b%b%b" % (head, self._sequence, middle, orjson.dumps(text), tail))
            self._sequence += 1
        return b"".join(out)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def finish(self, answers: Sequence[Answer]) -> bytes:
        (answer,) = answers
        interaction = answer.interaction
        out = b"" if self._open is not None else self._begin(_Kind.MESSAGE)
        if answer.logprobs is not None and self._open is not None:
            self._open.logprobs = list(text_logprobs(answer.logprobs, self._open.text))
        out += self._close(last_status(interaction))
        response = response_end(self._head, answer, self._closed)
        return out + self._event(f"response.{response['status']}", response=response) + sse.DONE

    def error(self, error: ProxyError) -> bytes:
        failure = {"code": _error_code(error), "message": _error_message(error)}
        response = {**self._head, "status": "failed", "error": failure, "output": self._closed}
        return self._event("response.failed", response=response) + sse.DONE

    def _begin(self, kind: _Kind, number: int | None = None, call_id: str = "", name: str = "") -> bytes:
        """Close the open item and begin one of `kind`. Return the events."""
        out = self._close("completed")
        if number is None:
            number = sum(item["type"] == kind for item in self._closed)
        item = _OpenItem(kind, len(self._closed), number, "", call_id, name)
        if kind is _Kind.CALL and name in self._items.typed:
            item.announced = False
            self._open = item
            return out
        announced = self._item_json(item, "in_progress")
        item.id = announced["id"]
        item.around = self._around(item)
        self._open = item
        out += self._event("response.output_item.added", output_index=item.index, item=announced)
        if kind is _Kind.MESSAGE:
            out += self._item_event("response.content_part.added", item, content_index=0, part=text_part(""))
        elif kind is _Kind.REASONING:
            out += self._item_event(
                "response.reasoning_summary_part.added", item, summary_index=0, part=summary_part("")
            )
        return out

    def _around(self, item: _OpenItem) -> tuple[bytes, bytes, bytes]:
        name, more = _PIECES[item.kind]
        event = {"type": name, "sequence_number": None, "item_id": item.id, "output_index": item.index, "delta": None}
        head, rest = sse.cut(sse.event(name, event | more), "sequence_number")
        return head, *sse.cut(rest, "delta")

    def _close(self, status: str) -> bytes:
        """Close the open item, if there is one. Return its last events."""
        item = self._open
        if item is None:
            return b""
        done = self._item_json(item, status)
        self._closed.append(done)
        self._open = None
        out = self._ended(item) if item.announced else self._typed(item, done)
        return out + self._event("response.output_item.done", output_index=item.index, item=done)

    def _typed(self, item: _OpenItem, done: dict[str, Any]) -> bytes:
        """Return the events of the call of a tool that is no function, from its announcement on."""
        item.id = done["id"]
        begun = {**done, "status": "in_progress"}
        if done["type"] == "custom_tool_call":
            begun["input"] = ""
        out = self._event("response.output_item.added", output_index=item.index, item=begun)
        if done["type"] == "custom_tool_call":
            out += self._item_event("response.custom_tool_call_input.delta", item, delta=done["input"])
            out += self._item_event("response.custom_tool_call_input.done", item, input=done["input"])
        elif done["type"] == "shell_call" and isinstance(commands := done["action"].get("commands"), list):
            for at, command in enumerate(commands):
                place = {"output_index": item.index, "command_index": at}
                out += self._event("response.shell_call_command.added", **place, command="")
                out += self._event("response.shell_call_command.delta", **place, delta=command)
                out += self._event("response.shell_call_command.done", **place, command=command)
        return out

    def _ended(self, item: _OpenItem) -> bytes:
        text = item.text
        match item.kind:
            case _Kind.REASONING:
                out = self._item_event("response.reasoning_summary_text.done", item, summary_index=0, text=text)
                part = summary_part(text)
                return out + self._item_event("response.reasoning_summary_part.done", item, summary_index=0, part=part)
            case _Kind.CALL:
                event = "response.function_call_arguments.done"
                return self._item_event(event, item, name=item.name, arguments=text)
            case _Kind.MESSAGE:
                part = text_part(text, item.logprobs)
                more = {"content_index": 0, "text": text, "logprobs": part["logprobs"]}
                out = self._item_event("response.output_text.done", item, **more)
                return out + self._item_event("response.content_part.done", item, content_index=0, part=part)

    def _item_json(self, item: _OpenItem, status: str) -> dict[str, Any]:
        match item.kind:
            case _Kind.REASONING:
                return self._items.reasoning(item.number, item.text, status)
            case _Kind.CALL:
                return self._items.call(item.number, ToolCall(item.call_id, item.name, item.text), status)
            case _Kind.MESSAGE:
                text = None if status == "in_progress" else item.text
                return self._items.message(item.number, text, status, item.logprobs)

    def _item_event(self, event: str, item: _OpenItem, **more: Any) -> bytes:
        return self._event(event, item_id=item.id, output_index=item.index, **more)

    def _event(self, event: str, **fields: Any) -> bytes:
        payload = {"type": event, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse.event(event, payload)


def _error_code(error: ProxyError) -> str:
    """Return the error code. Codex retries after all of these codes except the context-length code."""
    if isinstance(error, ContextLengthExceeded | TooManyRequests):
        return error.code
    return "server_error" if error.retryable else "invalid_prompt"


def _error_message(error: ProxyError) -> str:
    """Return the message. Codex parses the time to wait from "try again in ...s"."""
    if isinstance(error, TooManyRequests) and error.retry_after_s is not None:
        return f"{error.message}. Please try again in {error.retry_after_s:g}s."
    return error.message
