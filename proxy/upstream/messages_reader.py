"""Reads a streamed message of the Messages API, from `message_start` to `message_stop`."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.upstream.answer import AnswerParts, Part, UpstreamAnswer, UpstreamUsage
from proxy.upstream.events import Event, count_in, json_of, object_in, objects_in, text_in
from proxy.upstream.failure import Failure, told
from tokengrove.errors import brief
from tokengrove.reasons import FinishReason

_FINISH = {
    **{"end_turn": FinishReason.STOP, "stop_sequence": FinishReason.STOP_STRING, "max_tokens": FinishReason.LENGTH},
    **{"tool_use": FinishReason.TOOL_CALLS, "refusal": FinishReason.CONTENT_FILTER},
    "model_context_window_exceeded": FinishReason.LENGTH,
}
_CACHED = ("cache_read_input_tokens", "cache_creation_input_tokens")


class MessagesReader:
    """Writes the content blocks of a message to `parts`."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._blocks: dict[Any, Part | None] = {}
        self._begun = False
        self._finish: FinishReason | None = None
        self._stop_string: str | None = None
        self._usage: dict[str, Any] = {}
        self._model = ""
        self._stopped = False

    def read(self, event: Event) -> bool:
        """Read an event; return True if it is the last one. Raises Failure."""
        value = json_of(event.data)
        kind = text_in(value, "type") or event.name
        if kind == "error" or value.get("error"):
            raise told(value.get("error") or value)
        if kind == "ping":
            return False
        if not self._begun and kind != "message_start":
            raise Failure("the external model sends something that is no message", brief(value))
        match kind:
            case "message_start":
                self._begin(object_in(value, "message"))
            case "content_block_start":
                self._block(value.get("index"), object_in(value, "content_block"))
            case "content_block_delta":
                self._delta(self._open(value), object_in(value, "delta"))
            case "content_block_stop":
                if (call := self._open(value)) is not None:
                    self._parts.end_call(call)
                del self._blocks[value.get("index")]
            case "message_delta":
                self._stop(object_in(value, "delta"))
                self._count(object_in(value, "usage"))
            case "message_stop":
                self._stopped = True
        return self._stopped

    def whole(self, answer: dict[str, Any]) -> None:
        """Read an answer that is not streamed. Raises Failure."""
        if answer.get("error"):
            raise told(answer["error"])
        if not isinstance(answer.get("content"), list):
            raise Failure("the external model sends something that is no message", brief(answer))
        self._begin(answer)
        for index, block in enumerate(objects_in(answer, "content")):
            self._block(index, block)
            if (call := self._blocks.pop(index)) is not None:
                self._parts.end_call(call)
        self._stop(answer)
        self._stopped = True

    def end(self) -> UpstreamAnswer:
        """Return the answer. Raises Failure if it is not complete."""
        if not self._stopped or self._finish is None:
            lacking = "stop_reason" if self._stopped else "message_stop"
            raise Failure(f"the external model's answer breaks off: it has no {lacking}")
        message, finish = self._parts.message(self._finish)
        return UpstreamAnswer(message, finish, self._counted(), self._model, self._stop_string)

    def _begin(self, message: dict[str, Any]) -> None:
        self._begun = True
        self._model = text_in(message, "model")
        self._count(object_in(message, "usage"))

    def _block(self, index: Any, block: dict[str, Any]) -> None:
        """Begin a block, which may already have content."""
        if type(index) is not int or index in self._blocks:
            raise Failure("the external model begins a block whose index is none, or is in use", brief(index))
        self._blocks[index] = None
        match block.get("type"):
            case "text":
                self._parts.text(text_in(block, "text"))
            case "thinking":
                self._parts.reasoning(text_in(block, "thinking"))
            case "tool_use":
                call = self._parts.begin_call(text_in(block, "id"), text_in(block, "name"), told=True)
                self._blocks[index] = call
                if block.get("input"):
                    self._parts.arguments(call, orjson.dumps(block["input"]).decode())

    def _open(self, event: dict[str, Any]) -> Part | None:
        """The call of the block that an event continues; None for a block of another kind."""
        index = event.get("index")
        if type(index) is not int or index not in self._blocks:
            raise Failure("the external model continues a block that it has not begun", brief(index))
        return self._blocks[index]

    def _delta(self, call: Part | None, delta: dict[str, Any]) -> None:
        match delta.get("type"):
            case "text_delta":
                self._parts.text(text_in(delta, "text"))
            case "thinking_delta":
                self._parts.reasoning(text_in(delta, "thinking"))
            case "input_json_delta" if call is not None:
                self._parts.arguments(call, text_in(delta, "partial_json"))

    def _stop(self, message: dict[str, Any]) -> None:
        reason = message.get("stop_reason")
        if reason is None:
            return
        if not isinstance(reason, str) or reason not in _FINISH:
            raise Failure("the external model ends its answer for an unknown reason", brief(reason))
        self._finish = _FINISH[reason]
        if self._finish is FinishReason.STOP_STRING:
            self._stop_string = text_in(message, "stop_sequence") or None

    def _count(self, usage: dict[str, Any]) -> None:
        self._usage |= {name: value for name, value in usage.items() if value is not None}

    def _counted(self) -> UpstreamUsage:
        """The usage. The API tells cached tokens of the prompt beside the others."""
        prompt, cached = count_in(self._usage, "input_tokens"), [count_in(self._usage, name) for name in _CACHED]
        return UpstreamUsage(
            None if prompt is None else prompt + sum(count or 0 for count in cached),
            count_in(self._usage, "output_tokens"),
            cached[0],
            count_in(object_in(self._usage, "output_tokens_details"), "thinking_tokens"),
        )
