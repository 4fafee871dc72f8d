"""Writes a chat completion, whole or as a stream of chunks. The joined chunks give the same message and token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from proxy.protocols import sse
from proxy.protocols.custom_tools import input_of
from proxy.protocols.error_envelopes import openai_error
from proxy.protocols.openai_choices import FINISH_REASONS, finish_reason, usage_json
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    TokenLogprob,
    TokensDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from proxy.types import Ids, Message, ToolCall, TurnRequest
from tokengrove.errors import ProxyError


def completion_json(request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a whole `chat.completion` object with one choice per answer.

    With `return_token_ids` it has `prompt_token_ids`, and each choice `token_ids`, as in vLLM; with
    `return_completion_text` each choice has `completion_text`.
    """
    first, prompt_ids = answers[0].interaction, answers[0].prompt_ids
    choices = []
    for index, answer in enumerate(answers):
        turn = answer.interaction
        assert turn.finish_reason is not None
        choice: dict[str, Any] = {
            "index": index,
            "message": message_json(turn.sampled_output if turn.prefill else turn.output, request.echo.get("typed")),
            "logprobs": None if answer.logprobs is None else _logprobs_json(answer.logprobs),
            "finish_reason": FINISH_REASONS[turn.finish_reason],
        }
        if request.return_token_ids:
            choice["token_ids"] = turn.output_ids.tolist()
        if answer.completion_text is not None:
            choice["completion_text"] = answer.completion_text
        choices.append(choice)
    return {
        "id": first.id,
        "object": "chat.completion",
        "created": int(first.created_at),
        "model": request.model,
        "choices": choices,
        "usage": usage_json(answers),
        "system_fingerprint": None,
        **({} if prompt_ids is None else {"prompt_token_ids": prompt_ids.tolist()}),
    }


class ChatStream:
    """One streamed chat completion: `chat.completion.chunk` events that share one id, then `[DONE]`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: TurnRequest, reply_id: str, created: int, prompt_ids: Ids | None = None) -> None:
        self._include_usage = request.include_usage
        self._per_token, self._return_token_ids = request.per_token, request.return_token_ids
        self._prompt_ids = prompt_ids
        self._choices = request.n
        self._head: dict[str, Any] = {
            "id": reply_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
            "system_fingerprint": None,
        }
        self._typed: Mapping[str, Any] = request.echo.get("typed", {})
        self._inputs: dict[tuple[int, int], list[str]] = {}
        self._text: dict[int, tuple[bytes, bytes]] = {}
        self._reasoning: dict[int, tuple[bytes, bytes]] = {}

    def start(self) -> bytes:
        first = {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids.tolist()}
        choices = [self._choice({"role": "assistant", "content": ""}, k, None, None) for k in range(self._choices)]
        return self._event(choices[0], **first) + b"".join(map(self._event, choices[1:]))

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        if self._per_token:
            return self._with_tokens(deltas, choice)
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, TextDelta) and not delta.logprobs:
                head, tail = self._text.get(choice) or self._cut(self._text, "content", choice)
                out += (head, orjson.dumps(delta.text), tail)
            elif isinstance(delta, ReasoningDelta):
                head, tail = self._reasoning.get(choice) or self._cut(self._reasoning, "reasoning_content", choice)
                out += (head, orjson.dumps(delta.text), tail)
            else:
                out.append(self._rare(delta, choice))
        return b"".join(out)

    def _cut(self, cuts: dict[int, tuple[bytes, bytes]], field: str, choice: int) -> tuple[bytes, bytes]:
        """Note in `cuts` the event of a piece of `field`, cut around the piece. Many replies need only one field."""
        cuts[choice] = around = sse.cut(self._chunk({field: None}, choice), field)
        return around

    def _rare(self, delta: Delta, choice: int) -> bytes:
        """The event of a delta that most tokens do not have."""
        piece = self._piece(delta, choice)
        if piece is None:
            return b""
        logprobs = _logprobs_json(delta.logprobs) if isinstance(delta, TextDelta) else None
        return self._chunk(piece, choice, logprobs=logprobs)

    def _with_tokens(self, deltas: Sequence[Delta], choice: int) -> bytes:
        """The events of a reply that shows every token: tokens are in the chunk that follows them."""
        out: list[bytes] = []
        tokens: list[TokensDelta] = []
        for delta in deltas:
            if isinstance(delta, TokensDelta):
                tokens.append(delta)
            elif (piece := self._piece(delta, choice)) is not None:
                out.append(self._of_tokens(piece, choice, tokens))
                tokens = []
        if tokens:
            out.append(self._of_tokens({}, choice, tokens))
        return b"".join(out)

    def _of_tokens(self, piece: dict[str, Any], index: int, tokens: Sequence[TokensDelta]) -> bytes:
        logprobs = [entry for delta in tokens for entry in delta.logprobs]
        choice = self._choice(piece, index, None, _logprobs_json(logprobs) if logprobs else None)
        if self._return_token_ids:
            choice["token_ids"] = [token for delta in tokens for token in delta.ids]
        return self._event(choice)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def finish(self, answers: Sequence[Answer]) -> bytes:
        out = b"".join([self._end(answer, at) for at, answer in enumerate(answers)])
        if self._inputs:
            out = b"".join([self._chunk(self._input(*place), place[0]) for place in sorted(self._inputs)]) + out
        if self._include_usage:
            out += sse.data({**self._head, "choices": [], "usage": usage_json(answers)})
        return out + sse.DONE

    def error(self, error: ProxyError) -> bytes:
        return sse.data(openai_error(error))

    def _piece(self, delta: Delta, choice: int) -> dict[str, Any] | None:
        """Return the `delta` of a chunk, or None. The input of a custom tool is known once its call ends."""
        if isinstance(delta, ToolCallStart) and delta.name in self._typed:
            self._inputs[choice, delta.index] = []
            custom = {"name": delta.name, "input": ""}
            return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "custom", "custom": custom}]}
        if isinstance(delta, ToolCallArguments) and (choice, delta.index) in self._inputs:
            self._inputs[choice, delta.index].append(delta.fragment)
            return None
        if isinstance(delta, ToolCallEnd) and (choice, delta.index) in self._inputs:
            return self._input(choice, delta.index)
        return _piece(delta)

    def _input(self, choice: int, index: int) -> dict[str, Any]:
        text = input_of("".join(self._inputs.pop((choice, index))))
        return {"tool_calls": [{"index": index, "custom": {"input": text}}]}

    def _end(self, answer: Answer, index: int) -> bytes:
        choice = self._choice({}, index, finish_reason(answer.interaction), None)
        return self._event({**choice, **answer.text_json()})

    def _chunk(
        self, delta: dict[str, Any], index: int, finish: str | None = None, logprobs: Any = None, **more: Any
    ) -> bytes:
        return self._event(self._choice(delta, index, finish, logprobs), **more)

    def _choice(self, delta: dict[str, Any], index: int, finish: str | None, logprobs: Any) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        payload = {**self._head, "choices": [choice], **more}
        if self._include_usage:
            payload["usage"] = None
        return sse.data(payload)


def _piece(delta: Delta) -> dict[str, Any] | None:
    """Return the `delta` of a chunk; None for the end of a call, which has no event in the chat API."""
    match delta:
        case TextDelta(text):
            return {"content": text}
        case ReasoningDelta(text):
            return {"reasoning_content": text}
        case ToolCallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case ToolCallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case _:
            return None


def message_json(output: Message, typed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the message of a choice. `typed`: the custom tools, by name; None: none."""
    message: dict[str, Any] = {"role": "assistant", "content": output.content, "refusal": None}
    if output.tool_calls:
        message["content"] = output.content or None
        message["tool_calls"] = [_call_json(call, typed) for call in output.tool_calls]
    if output.reasoning is not None:
        message["reasoning_content"] = output.reasoning
    return message


def _call_json(call: ToolCall, typed: Mapping[str, Any] | None) -> dict[str, Any]:
    if typed is not None and call.name in typed:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    entries = [{**_token_json(token), "top_logprobs": [_token_json(other) for other in token.top]} for token in tokens]
    return {"content": entries, "refusal": None}


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.utf8)}
