"""Writes the reply of the Messages API, whole or as a stream of events. Both give the same message.

Blocks of a stream are strictly sequential. Only `finish`, which follows the commit, closes the last block. A stream
that fails sends neither `message_delta` nor `message_stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.protocols import sse
from proxy.protocols.error_envelopes import anthropic_error_event
from proxy.protocols.messages.toolsets import named_call
from proxy.protocols.signatures import signature_of
from proxy.protocols.tool_inputs import RAW_ARGUMENTS, input_of
from proxy.protocols.wire_protocol import Answer, usage_of
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallStart
from proxy.types import Ids, Interaction, TurnRequest
from tokengrove.errors import ProxyError
from tokengrove.reasons import FinishReason

_STOP_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.STOP_STRING: "stop_sequence",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.CONTENT_FILTER: "refusal",
    FinishReason.ABORT: "end_turn",
}
_RUNS = (TextDelta, ReasoningDelta)
_EMPTY = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}


def message_json(request: TurnRequest, answer: Answer) -> dict[str, Any]:
    """Return a whole `message` object."""
    interaction = answer.interaction
    more: dict[str, Any] = {}
    if answer.prompt_ids is not None or request.return_token_ids or answer.completion_text is not None:
        more = {**_prompt_json(answer.prompt_ids), **_output_json(request, answer)}
    return {
        "id": interaction.id,
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": _content_json(interaction, request),
        **_stop_json(interaction),
        "usage": _usage_json(interaction),
        **more,
    }


def _prompt_json(prompt_ids: Ids | None) -> dict[str, Any]:
    return {} if prompt_ids is None else {"prompt_token_ids": prompt_ids.tolist()}


def _output_json(request: TurnRequest, answer: Answer) -> dict[str, Any]:
    tokens = {"token_ids": answer.interaction.output_ids.tolist()} if request.return_token_ids else {}
    return {**tokens, **answer.text_json()}


def _content_json(interaction: Interaction, request: TurnRequest) -> list[dict[str, Any]]:
    output = interaction.sampled_output if interaction.prefill else interaction.output
    blocks: list[dict[str, Any]] = []
    if output.reasoning:
        signature = signature_of(interaction.id)
        blocks.append({"type": "thinking", "thinking": output.reasoning, "signature": signature})
    if output.content:
        blocks.append({"type": "text", "text": output.content})
    for call in output.tool_calls:
        named = named_call(call.name, request.echo.get("toolsets", ()))
        blocks.append({"type": "tool_use", "id": call.id, **named, "input": input_of(call.arguments)})
    return blocks


def _stop_json(interaction: Interaction) -> dict[str, Any]:
    finish = interaction.finish_reason
    assert finish is not None
    reason = _STOP_REASONS[finish]
    if finish is FinishReason.LENGTH and not interaction.output_ids:  # the prompt filled the context window
        reason = "model_context_window_exceeded"
    sequence = interaction.stop_string if finish is FinishReason.STOP_STRING else None
    return {"stop_reason": reason, "stop_sequence": sequence}


def _usage_json(interaction: Interaction) -> dict[str, Any]:
    """Return the usage. `input_tokens` excludes cached tokens: clients add both to compute the context usage."""
    usage = usage_of(interaction)
    cached = min(usage.cached_tokens, usage.prompt_tokens)  # a resumed reply's own tokens may also be cached
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


class MessageStream:
    """One streamed message: named events, from `message_start` to `message_stop`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: TurnRequest, reply_id: str, prompt_tokens: int, prompt_ids: Ids | None = None) -> None:
        self._request = request
        self._prompt_ids = prompt_ids
        self._id = reply_id
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open: str | None = None
        self._around = (b"", b"")
        self._arguments: str | None = None

    def start(self) -> bytes:
        usage = {"input_tokens": self._prompt_tokens, "output_tokens": 0}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        message: dict[str, Any] = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        message |= {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        message |= _prompt_json(self._prompt_ids)
        return _event("message_start", message=message) + self.keepalive()

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, _RUNS):
                kind = "text" if isinstance(delta, TextDelta) else "thinking"
                if kind != self._open:
                    out.append(self._begin(kind, _EMPTY[kind]))
                    self._around = sse.cut(self._piece(f"{kind}_delta", **{kind: None}), kind)
                head, tail = self._around
                out += (head, orjson.dumps(delta.text), tail)
            else:
                out.append(self._of_call(delta))
        return b"".join(out)

    def _of_call(self, delta: Delta) -> bytes:
        match delta:
            case ToolCallStart(_, call_id, name):
                named = named_call(name, self._request.echo.get("toolsets", ()))
                head = self._begin("tool_use", {"id": call_id, **named, "input": {}})
                self._arguments = ""
                return head + self._piece("input_json_delta", partial_json="")
            case ToolCallArguments(_, fragment):
                return self._add_arguments(fragment)
            case _:
                return b""  # the next block or the end of the reply closes the call

    def keepalive(self) -> bytes:
        return _event("ping")

    def finish(self, answers: Sequence[Answer]) -> bytes:
        interaction = answers[0].interaction
        tokens = _output_json(self._request, answers[0])
        end = _event("message_delta", delta=_stop_json(interaction), usage=_usage_json(interaction), **tokens)
        return self._close() + end + _event("message_stop")

    def error(self, error: ProxyError) -> bytes:
        return sse.event("error", anthropic_error_event(error))

    def _begin(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Close the open block and begin one of `kind`. Return the events."""
        out = self._close()
        self._index += 1
        self._open = kind
        return out + _event("content_block_start", index=self._index, content_block={"type": kind, **empty})

    def _close(self) -> bytes:
        """Close the open block, if there is one. Return its last events."""
        kind, self._open = self._open, None
        if kind is None:
            return b""
        out = self._piece("signature_delta", signature=signature_of(self._id)) if kind == "thinking" else b""
        if kind == "tool_use":
            out = self._held_arguments()
        return out + _event("content_block_stop", index=self._index)

    def _add_arguments(self, fragment: str) -> bytes:
        """Stream the text of a JSON object as it arrives. Hold any other text, because `input` must be an object."""
        if self._arguments is None:
            return self._piece("input_json_delta", partial_json=fragment)
        self._arguments += fragment
        if not self._arguments.lstrip().startswith("{"):
            return b""
        arguments, self._arguments = self._arguments, None
        return self._piece("input_json_delta", partial_json=arguments)

    def _held_arguments(self) -> bytes:
        held, self._arguments = self._arguments, None
        if not held or not held.strip():
            return b""
        return self._piece("input_json_delta", partial_json=orjson.dumps({RAW_ARGUMENTS: held}).decode())

    def _piece(self, kind: str, **fields: str | None) -> bytes:
        return _event("content_block_delta", index=self._index, delta={"type": kind, **fields})


def _event(kind: str, **fields: Any) -> bytes:
    return sse.event(kind, {"type": kind, **fields})
