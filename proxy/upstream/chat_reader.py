"""Reads a streamed chat completion. It ends with `[DONE]` or with its connection, after a `finish_reason`."""

from __future__ import annotations

from typing import Any

from proxy.upstream.answer import AnswerParts, Part, UpstreamAnswer, UpstreamUsage
from proxy.upstream.events import Event, count_in, json_of, object_in, objects_in, text_in
from proxy.upstream.failure import Failure, told
from tokengrove.errors import brief
from tokengrove.reasons import FinishReason

_DONE = b"[DONE]"
_FINISH = {
    **{"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "tool_calls": FinishReason.TOOL_CALLS},
    **{"content_filter": FinishReason.CONTENT_FILTER, "eos_token": FinishReason.STOP},
}


class ChatReader:
    """Writes the chunks of a chat completion to `parts`."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._calls: dict[Any, Part] = {}
        self._finish: FinishReason | None = None
        self._usage = UpstreamUsage()
        self._model = ""

    def read(self, event: Event) -> bool:
        """Read an event; return True if it is the last one. Raises Failure."""
        if event.data.strip() == _DONE:
            return True
        self._chunk(json_of(event.data))
        return False

    def whole(self, answer: dict[str, Any]) -> None:
        """Read an answer that is not streamed. Raises Failure."""
        choices: list[dict[str, Any]] = []
        for choice in objects_in(answer, "choices"):
            message = object_in(choice, "message")
            calls = [{**call, "index": index} for index, call in enumerate(objects_in(message, "tool_calls"))]
            choices.append({**choice, "delta": {**message, "tool_calls": calls}})
        self._chunk({**answer, "choices": choices} if choices else answer)

    def end(self) -> UpstreamAnswer:
        """Return the answer. Raises Failure if it is not complete."""
        if self._finish is None:
            raise Failure("the external model's answer breaks off: it has no finish_reason")
        message, finish = self._parts.message(self._finish)
        return UpstreamAnswer(message, finish, self._usage, self._model)

    def _chunk(self, chunk: dict[str, Any]) -> None:
        if chunk.get("error"):
            raise told(chunk["error"])
        if not isinstance(chunk.get("choices"), list):
            raise Failure("the external model sends something that is no chat completion", brief(chunk))
        self._model = text_in(chunk, "model") or self._model
        if usage := object_in(chunk, "usage"):
            self._usage = _usage(usage)
        for choice in objects_in(chunk, "choices"):
            if choice.get("index") not in (0, None):
                raise Failure("the external model sends several choices, but was asked for one")
            self._delta(object_in(choice, "delta"))
            if (reason := choice.get("finish_reason")) is not None:
                self._finish = _finish(reason)

    def _delta(self, delta: dict[str, Any]) -> None:
        self._parts.reasoning(text_in(delta, "reasoning_content") or text_in(delta, "reasoning"))
        self._parts.text(text_in(delta, "content"))
        self._parts.text(text_in(delta, "refusal"))
        for call in objects_in(delta, "tool_calls"):
            self._call(call)
        if delta.get("function_call"):
            raise Failure("the external model sends a 'function_call', but was given tools")

    def _call(self, piece: dict[str, Any]) -> None:
        """A piece of a tool call. Some servers give all calls the same index, or none, and repeat ids in all pieces."""
        function, call_id = object_in(piece, "function"), text_in(piece, "id")
        index = piece.get("index")
        if index is not None and type(index) is not int:
            raise Failure("the external model sends a tool call whose index is no number", brief(index))
        call = self._calls.get(call_id if index is None and call_id else index)
        if call is None or (call_id and call_id != call.call_id):
            call = self._parts.begin_call(call_id, text_in(function, "name"), told=False)
            self._calls[index] = self._calls[call_id] = call
        self._parts.arguments(call, text_in(function, "arguments"))


def _finish(reason: Any) -> FinishReason:
    found = _FINISH.get(reason) if isinstance(reason, str) else None
    if found is None:
        raise Failure("the external model ends its answer for an unknown reason", brief(reason))
    return found


def _usage(usage: dict[str, Any]) -> UpstreamUsage:
    return UpstreamUsage(
        count_in(usage, "prompt_tokens"),
        count_in(usage, "completion_tokens"),
        count_in(object_in(usage, "prompt_tokens_details"), "cached_tokens"),
        count_in(object_in(usage, "completion_tokens_details"), "reasoning_tokens"),
    )
