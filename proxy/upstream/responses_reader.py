"""Reads a streamed response of the Responses API, from `response.created` to one of three last events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.upstream.answer import AnswerParts, Part, UpstreamAnswer, UpstreamUsage
from proxy.upstream.events import Event, count_in, json_of, object_in, objects_in, text_in
from proxy.upstream.failure import Failure, told
from tokengrove.errors import brief
from tokengrove.reasons import FinishReason

_INCOMPLETE = {"max_output_tokens": FinishReason.LENGTH, "content_filter": FinishReason.CONTENT_FILTER}
_FAILED = ("failed", "cancelled")
_TEXT = ("response.output_text.delta", "response.refusal.delta")
_REASONING = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")


@dataclass(slots=True)
class _Item:
    """An output item. `source`: the event that its text comes from. `call`: of an item `function_call`."""

    source: str = ""
    call: Part | None = None
    done: bool = False


class ResponsesReader:
    """Writes the output items of a response to `parts`."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._items: dict[Any, _Item] = {}
        self._finish: FinishReason | None = None
        self._usage = UpstreamUsage()
        self._model = ""

    def read(self, event: Event) -> bool:
        """Read an event; return True if it is the last one. Raises Failure."""
        if event.data.strip() == b"[DONE]":  # some servers end every stream with it
            return True
        value = json_of(event.data)
        kind = text_in(value, "type") or event.name
        if kind == "error" or (value.get("error") and not kind.startswith("response.")):
            raise told(value.get("error") or value)
        if not kind.startswith("response."):
            if kind in ("ping", "keepalive"):
                return False
            raise Failure("the external model sends an event that is none of the Responses API", brief(value))
        match kind:
            case "response.output_item.added":
                self._begin(value.get("output_index"), object_in(value, "item"))
            case "response.output_item.done":
                self._done(value.get("output_index"), object_in(value, "item"))
            case "response.function_call_arguments.delta":
                self._parts.arguments(self._call(value), text_in(value, "delta"))
            case "response.function_call_arguments.done":
                self._end_call(self._call(value), text_in(value, "arguments"))
            case "response.reasoning_summary_part.added" if value.get("summary_index"):
                self._reason("response.reasoning_summary_text.delta", value.get("output_index"), "\n\n")
            case "response.completed" | "response.incomplete" | "response.failed":
                self._response(object_in(value, "response"))
                return True
            case _ if kind in _TEXT:
                self._item(value.get("output_index")).source = kind
                self._parts.text(text_in(value, "delta"))
            case _ if kind in _REASONING:
                self._reason(kind, value.get("output_index"), text_in(value, "delta"))
        return False

    def whole(self, answer: dict[str, Any]) -> None:
        """Read an answer that is not streamed. Raises Failure."""
        if answer.get("error"):
            raise told(answer["error"])
        if not isinstance(answer.get("output"), list):
            raise Failure("the external model sends something that is no response", brief(answer))
        self._response(answer)

    def end(self) -> UpstreamAnswer:
        """Return the answer. Raises Failure if it is not complete."""
        if self._finish is None:
            raise Failure("the external model's answer breaks off: it has no event response.completed")
        message, finish = self._parts.message(self._finish)
        return UpstreamAnswer(message, finish, self._usage, self._model)

    def _item(self, index: Any) -> _Item:
        if type(index) is not int:
            raise Failure("the external model sends an event without an output_index", brief(index))
        return self._items.setdefault(index, _Item())

    def _begin(self, index: Any, item: dict[str, Any]) -> _Item:
        found = self._item(index)
        if item.get("type") == "function_call" and found.call is None:
            call_id = text_in(item, "call_id")
            found.call = self._parts.begin_call(call_id, text_in(item, "name"), told=True)
        return found

    def _done(self, index: Any, item: dict[str, Any]) -> None:
        """Read a complete item. What was not streamed of it is taken from here."""
        found = self._begin(index, item)
        if found.done:
            return
        found.done = True
        if found.call is not None:
            self._end_call(found.call, text_in(item, "arguments"), cut=item.get("status") == "incomplete")
        elif not found.source and item.get("type") == "message":
            for part in objects_in(item, "content"):
                self._parts.text(text_in(part, "text") or text_in(part, "refusal"))
        elif not found.source and item.get("type") == "reasoning":
            texts = objects_in(item, "content") or objects_in(item, "summary")
            self._parts.reasoning("\n\n".join(text_in(part, "text") for part in texts))

    def _call(self, event: dict[str, Any]) -> Part:
        call = self._item(event.get("output_index")).call
        if call is None:
            raise Failure("the external model sends arguments of a tool call that it has not begun")
        return call

    def _end_call(self, call: Part, arguments: str, *, cut: bool = False) -> None:
        """End a call with its whole arguments. Those that were streamed must be their beginning."""
        if arguments and not call.ended:
            if not arguments.startswith(call.text):
                raise Failure("the external model streams other arguments of a tool call than it then states")
            self._parts.arguments(call, arguments[len(call.text) :])
        if not cut:
            self._parts.end_call(call)

    def _reason(self, source: str, index: Any, text: str) -> None:
        """Add reasoning. Of an item that has its text and a summary, only what came first is taken."""
        item = self._item(index)
        item.source = item.source or source
        if item.source == source:
            self._parts.reasoning(text)

    def _response(self, response: dict[str, Any]) -> None:
        """Read the response of the last event, which repeats its items."""
        if response.get("error") or response.get("status") in _FAILED:
            raise told(response.get("error"))
        if not self._items:  # some servers stream no items
            for index, item in enumerate(objects_in(response, "output")):
                self._done(index, item)
        self._model = text_in(response, "model")
        usage = object_in(response, "usage")
        self._usage = UpstreamUsage(
            count_in(usage, "input_tokens"),
            count_in(usage, "output_tokens"),
            count_in(object_in(usage, "input_tokens_details"), "cached_tokens"),
            count_in(object_in(usage, "output_tokens_details"), "reasoning_tokens"),
        )
        if (status := response.get("status")) == "completed":
            self._finish = FinishReason.STOP
            return
        reason = object_in(response, "incomplete_details").get("reason")
        if status != "incomplete" or reason not in _INCOMPLETE:
            shown = brief(status if reason is None else reason)
            raise Failure("the external model ends its answer for an unknown reason", shown)
        self._finish = _INCOMPLETE[reason]
