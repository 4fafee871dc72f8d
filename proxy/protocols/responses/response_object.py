"""Writes the response object and its output items. Every response has every key of the API's schema.

`TurnRequest.echo` holds the request fields that the reply repeats, by the names in ECHOED. More entries shape the items
and are not repeated: `include`, as sent; `namespaces` (function name -> namespace); and `typed`, the definitions of
tools that are no functions, as sent (function name -> definition; absent without any).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.protocols.responses.client_tools import call_fields, id_prefix
from proxy.protocols.responses.item_ids import call_item_id, encrypt, message_id, reasoning_id
from proxy.protocols.wire_protocol import Answer, usage_of
from proxy.rendering.deltas import TokenLogprob
from proxy.types import Ids, Interaction, SamplingParams, Tool, ToolCall, TurnRequest
from tokengrove.reasons import FinishReason

INCLUDE_ENCRYPTED = "reasoning.encrypted_content"
INCLUDE_LOGPROBS = "message.output_text.logprobs"

# Request fields that the reply repeats, each with the value for a request that leaves it out.
ECHOED: Mapping[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "truncation": "disabled",
    "safety_identifier": None,
    "prompt_cache_key": None,
    "user": None,
    "metadata": {},
}
_INCOMPLETE = {FinishReason.LENGTH: "max_output_tokens", FinishReason.CONTENT_FILTER: "content_filter"}


def response_head(
    request: TurnRequest, response_id: str, created: int, prompt_ids: Ids | None = None
) -> dict[str, Any]:
    """Return a response in progress, without output. `created` is in Unix seconds. It has `prompt_ids` if given."""
    tokens = {} if prompt_ids is None else {"prompt_token_ids": prompt_ids.tolist()}
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": request.model,
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls,
        "tools": tools_json(request),
        "top_logprobs": request.top_logprobs,
        "service_tier": "default",
        "usage": None,
        **_sampling_json(request.sampling),
        **{name: request.echo.get(name, default) for name, default in ECHOED.items()},
        **tokens,
    }


def response_end(head: Mapping[str, Any], answer: Answer, output: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole response of a committed answer, with the sampling parameters that were used.

    It includes the ids of the output if `head` includes the ids of the prompt.
    """
    interaction = answer.interaction
    tokens = {"token_ids": interaction.output_ids.tolist()} if "prompt_token_ids" in head else {}
    reason = _incomplete_reason(interaction)
    text = {} if answer.completion_text is None else answer.text_json()
    return {
        **head,
        "status": "incomplete" if reason else "completed",
        "completed_at": None if reason else int(interaction.completed_at or interaction.created_at),
        "incomplete_details": {"reason": reason} if reason else None,
        "output": output,
        "usage": _usage_json(interaction),
        **_sampling_json(interaction.sampling),
        **tokens,
        **text,
    }


def last_status(interaction: Interaction) -> str:
    """Return the status of the last item, which is incomplete if the answer was cut off."""
    return "incomplete" if _incomplete_reason(interaction) else "completed"


@dataclass(frozen=True, slots=True)
class OutputItems:
    """Builds the output items of one response. `number` counts the items of one kind from 0."""

    response_id: str
    encrypted: bool
    namespaces: Mapping[str, str]
    typed: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, request: TurnRequest, response_id: str) -> OutputItems:
        """Return a builder with the options of `request`."""
        include = request.echo.get("include", ())
        echo = request.echo
        return cls(response_id, INCLUDE_ENCRYPTED in include, echo.get("namespaces", {}), echo.get("typed", {}))

    def all(self, answer: Answer) -> list[dict[str, Any]]:
        """Return reasoning, message and calls of a committed answer, or an empty message if it has none of them."""
        output, status = answer.interaction.output, last_status(answer.interaction)
        items = [self.reasoning(0, output.reasoning, "completed")] if output.reasoning else []
        if output.content or not (items or output.tool_calls):
            logprobs = text_logprobs(answer.logprobs, output.content) if answer.logprobs else ()
            items.append(self.message(0, output.content, "completed", logprobs))
        for number, call in enumerate(output.tool_calls):
            items.append(self.call(number, call, "completed"))
        return [*items[:-1], {**items[-1], "status": status}]

    def reasoning(self, number: int, text: str, status: str) -> dict[str, Any]:
        """Return a reasoning item with its text in `summary` only: some clients take `content` for part of the answer.

        An empty `text` gives the item in the form announced at its start.
        """
        item = {
            "id": reasoning_id(self.response_id, number),
            "type": "reasoning",
            "summary": [summary_part(text)] if text else [],
            "content": [],
            "status": status,
        }
        if self.encrypted and text:
            item["encrypted_content"] = encrypt(self.response_id, text)
        return item

    def message(
        self, number: int, text: str | None, status: str, logprobs: Sequence[TokenLogprob] = ()
    ) -> dict[str, Any]:
        """Return a message item. `text` None gives the item in the form announced at its start, without a part."""
        return {
            "id": message_id(self.response_id, number),
            "type": "message",
            "role": "assistant",
            "content": [] if text is None else [text_part(text, logprobs)],
            "status": status,
        }

    def call(self, number: int, call: ToolCall, status: str) -> dict[str, Any]:
        """Return the item of a call: of a function, or of the tool's own type."""
        if (definition := self.typed.get(call.name)) is not None:
            item_id = call_item_id(self.response_id, number, id_prefix(definition))
            item = {"id": item_id, **call_fields(call, definition), "status": status}
        else:
            item = {
                "id": call_item_id(self.response_id, number),
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
                "status": status,
            }
        if call.name in self.namespaces:
            item["namespace"] = self.namespaces[call.name]
        return item


def summary_part(text: str) -> dict[str, Any]:
    """Return the summary part that clients display: the whole reasoning, because this server does not summarise it."""
    return {"type": "summary_text", "text": text}


def text_part(text: str, logprobs: Sequence[TokenLogprob] = ()) -> dict[str, Any]:
    """Return the only content part of a message item."""
    return {
        "type": "output_text",
        "text": text,
        "annotations": [],
        "logprobs": logprobs_json(logprobs) if logprobs else [],
    }


def logprobs_json(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return tokens with their logprobs and most likely alternatives, as JSON."""
    return [{**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]} for token in tokens]


def text_logprobs(tokens: Sequence[TokenLogprob], text: str) -> Sequence[TokenLogprob]:
    """Return the `tokens` whose bytes make up `text`; all tokens if their joined bytes do not contain it."""
    start = b"".join(token.utf8 for token in tokens).find(text.encode())
    if start < 0 or not text:
        return tokens if text else ()
    end, at, kept = start + len(text.encode()), 0, []
    for token in tokens:
        if at < end and at + len(token.utf8) > start:
            kept.append(token)
        at += len(token.utf8)
    return kept


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}


def tools_json(request: TurnRequest) -> list[Mapping[str, Any]]:
    """Return the tools of a request: functions, and other tools as sent."""
    typed: Mapping[str, Mapping[str, Any]] = request.echo.get("typed", {})
    return [typed.get(tool.name) or _tool_json(tool) for tool in request.tools]


def _tool_json(tool: Tool) -> dict[str, Any]:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _sampling_json(sampling: SamplingParams) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }


def _incomplete_reason(interaction: Interaction) -> str | None:
    assert interaction.finish_reason is not None
    return _INCOMPLETE.get(interaction.finish_reason)


def _usage_json(interaction: Interaction) -> dict[str, Any]:
    usage = usage_of(interaction)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
