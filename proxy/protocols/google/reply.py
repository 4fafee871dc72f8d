"""Writes the reply of generateContent: whole, as server-sent events, or as one JSON array. All give the same answer.

Calls are in the last chunk of a stream, because this API sends each call whole. A stream that fails has no
`finishReason`: it ends with the error as plain JSON, which the SDKs raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from proxy.protocols import sse
from proxy.protocols.error_envelopes import google_error
from proxy.protocols.signatures import signature_of
from proxy.protocols.tool_inputs import input_of
from proxy.protocols.wire_protocol import Answer, usage_of
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, TokenLogprob
from proxy.types import Ids, Interaction, Message, TurnRequest
from tokengrove.errors import ProxyError
from tokengrove.reasons import FinishReason

_FINISH_REASONS = {
    FinishReason.STOP: "STOP",
    FinishReason.STOP_STRING: "STOP",
    FinishReason.LENGTH: "MAX_TOKENS",
    FinishReason.TOOL_CALLS: "STOP",
    FinishReason.CONTENT_FILTER: "SAFETY",
    FinishReason.ABORT: "STOP",
}

SHOWN_THOUGHTS = "includeThoughts"
"""The field of `TurnRequest.echo` that lets the reply show reasoning."""
# White space: the SDKs of this API take a comment for a part of the reply.
_KEEPALIVE = b"\n"


def response_json(request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a whole `GenerateContentResponse` with one candidate per answer.

    With `return_token_ids` it has `promptTokenIds`, and each candidate `tokenIds`; with `return_completion_text` each
    candidate has `completionText`.
    """
    candidates = []
    for index, answer in enumerate(answers):
        output = _output(answer.interaction)
        parts: list[dict[str, Any]] = []
        if output.reasoning and SHOWN_THOUGHTS in request.echo:
            parts.append({"text": output.reasoning, "thought": True})
        if output.content and output.tool_calls:
            parts.append({"text": output.content})
        parts += _last_parts(answer.interaction, output.content)
        logprobs = {} if answer.logprobs is None else {"logprobsResult": _logprobs_json(answer.logprobs)}
        candidates.append({**_candidate(parts, index), **logprobs, **_end_json(request, answer)})
    return {
        "candidates": candidates,
        "usageMetadata": _usage_json(answers),
        **_head(request, answers[0].interaction.id),
        **_prompt_json(answers[0].prompt_ids),
    }


class ContentStream:
    """One streamed reply: a `GenerateContentResponse` per event, of which the last one has the usage."""

    content_type = sse.CONTENT_TYPE
    _before, _after = b"data: ", b"\n\n"

    def __init__(self, request: TurnRequest, reply_id: str) -> None:
        self._request = request
        self._shows_thoughts = SHOWN_THOUGHTS in request.echo
        self._head = _head(request, reply_id)
        self._cuts: dict[tuple[bool, int], tuple[bytes, bytes]] = {}

    def start(self) -> bytes:
        return b""

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        out: list[bytes] = []
        for delta in deltas:
            if isinstance(delta, TextDelta):
                if delta.logprobs:
                    candidate = _candidate([{"text": delta.text}], choice)
                    out.append(self._chunk([{**candidate, "logprobsResult": _logprobs_json(delta.logprobs)}]))
                else:
                    out += self._text(delta.text, False, choice)
            elif isinstance(delta, ReasoningDelta) and self._shows_thoughts:
                out += self._text(delta.text, True, choice)
        return b"".join(out)

    def keepalive(self) -> bytes:
        return _KEEPALIVE

    def finish(self, answers: Sequence[Answer]) -> bytes:
        candidates = [
            {**_candidate(_last_parts(answer.interaction, ""), index), **_end_json(self._request, answer)}
            for index, answer in enumerate(answers)
        ]
        return self._chunk(candidates, usageMetadata=_usage_json(answers), **_prompt_json(answers[0].prompt_ids))

    def error(self, error: ProxyError) -> bytes:
        return orjson.dumps(google_error(error)) + b"\n"

    def _text(self, text: str, thought: bool, choice: int) -> tuple[bytes, bytes, bytes]:
        """The pieces of a chunk with a text."""
        cut = self._cuts.get((thought, choice))
        if cut is None:
            part = {"text": None, "thought": True} if thought else {"text": None}
            cut = self._cuts[thought, choice] = sse.cut(self._chunk([_candidate([part], choice)]), "text")
        return cut[0], orjson.dumps(text), cut[1]

    def _chunk(self, candidates: list[dict[str, Any]], **more: Any) -> bytes:
        return self._before + orjson.dumps({"candidates": candidates, **more, **self._head}) + self._after


class ContentArray(ContentStream):
    """One streamed reply as the items of one JSON array."""

    content_type = "application/json"
    _before, _after = b"", b",\n"

    def start(self) -> bytes:
        return b"[" + super().start()

    def finish(self, answers: Sequence[Answer]) -> bytes:
        return super().finish(answers).removesuffix(self._after) + b"]"

    def error(self, error: ProxyError) -> bytes:
        return orjson.dumps(google_error(error)) + b"]"


def _output(interaction: Interaction) -> Message:
    return interaction.sampled_output if interaction.prefill else interaction.output


def _last_parts(interaction: Interaction, text: str) -> list[dict[str, Any]]:
    """The calls of an answer, or else its `text`. The first part has the signature of the reasoning."""
    output = _output(interaction)
    parts: list[dict[str, Any]] = [
        {"functionCall": {"id": call.id, "name": call.name, "args": input_of(call.arguments)}}
        for call in output.tool_calls
    ]
    parts = parts or [{"text": text}]
    if output.reasoning:
        parts[0]["thoughtSignature"] = signature_of(interaction.id)
    return parts


def _candidate(parts: list[dict[str, Any]], index: int) -> dict[str, Any]:
    return {"content": {"role": "model", "parts": parts}, "index": index}


def _end_json(request: TurnRequest, answer: Answer) -> dict[str, Any]:
    """The fields at the end of a candidate."""
    interaction = answer.interaction
    assert interaction.finish_reason is not None
    end: dict[str, Any] = {"finishReason": _FINISH_REASONS[interaction.finish_reason]}
    if request.return_token_ids:
        end["tokenIds"] = interaction.output_ids.tolist()
    if answer.completion_text is not None:
        end["completionText"] = answer.completion_text
    return end


def _head(request: TurnRequest, reply_id: str) -> dict[str, Any]:
    return {"modelVersion": request.model, "responseId": reply_id}


def _prompt_json(prompt_ids: Ids | None) -> dict[str, Any]:
    return {} if prompt_ids is None else {"promptTokenIds": prompt_ids.tolist()}


def _usage_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return the usage. The prompt counts once, for any number of candidates; thoughts count apart from candidates."""
    usages = [usage_of(answer.interaction) for answer in answers]
    first, completion = usages[0], sum(usage.completion_tokens for usage in usages)
    thoughts = sum(usage.reasoning_tokens for usage in usages)
    return {
        "promptTokenCount": first.prompt_tokens,
        "candidatesTokenCount": completion - thoughts,
        "totalTokenCount": first.prompt_tokens + completion,
        "cachedContentTokenCount": first.cached_tokens,
        "thoughtsTokenCount": thoughts,
    }


def _logprobs_json(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """The logprobs of tokens; `topCandidates` only if alternatives were requested."""
    found: dict[str, Any] = {"chosenCandidates": [_token_json(token) for token in tokens]}
    if any(token.top for token in tokens):
        found["topCandidates"] = [{"candidates": [_token_json(other) for other in token.top]} for token in tokens]
    return found


def _token_json(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logProbability": token.logprob}
