"""Writes a text completion, whole or as a stream of chunks. The joined chunks give the same text, ids and logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.protocols import sse
from proxy.protocols.error_envelopes import openai_error
from proxy.protocols.openai_choices import finish_reason, usage_json
from proxy.protocols.wire_protocol import Answer
from proxy.rendering.deltas import Delta, TextDelta, TokenLogprob, TokensDelta
from proxy.types import Ids, Json, TurnRequest
from tokengrove.errors import ProxyError

ECHO = "text"
"""The entry of `TurnRequest.echo` with the text of the prompt, if the reply repeats it."""


def completion_json(request: TurnRequest, answers: Sequence[Answer]) -> dict[str, Any]:
    """Return a whole `text_completion` object with one choice per answer.

    With `return_token_ids` each choice has `prompt_token_ids` and `token_ids`, as in vLLM.
    """
    return completions_json([(request, answers)])


def completions_json(parts: Sequence[tuple[TurnRequest, Sequence[Answer]]]) -> dict[str, Any]:
    """Return one object for several prompts, with the choices of each in turn, and their usage together."""
    request, answers = parts[0]
    first = answers[0].interaction
    choices = [(asked, answer) for asked, answered in parts for answer in answered]
    return {
        "id": first.id,
        "object": "text_completion",
        "created": int(first.created_at),
        "model": request.model,
        "choices": [_choice_json(index, asked, answer) for index, (asked, answer) in enumerate(choices)],
        "usage": usage_json(answers) if len(parts) == 1 else _sum([usage_json(answered) for _, answered in parts]),
        "system_fingerprint": None,
    }


def _choice_json(index: int, request: TurnRequest, answer: Answer) -> dict[str, Any]:
    echo = request.echo.get(ECHO, "")
    logprobs = None
    if answer.logprobs is not None:
        logprobs = _logprobs_json(answer.logprobs, len(echo))
        for name, values in request.prompt_logprobs.items():
            logprobs[name] = [*values, *logprobs[name]]
    return {
        "index": index,
        "text": echo + answer.interaction.output.content,
        "logprobs": logprobs,
        "finish_reason": finish_reason(answer.interaction),
        **({"token_ids": answer.interaction.output_ids.tolist()} if request.return_token_ids else {}),
        **({} if answer.prompt_ids is None else {"prompt_token_ids": answer.prompt_ids.tolist()}),
    }


def _sum(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the sums of equal objects of numbers."""
    return {
        name: _sum([usage[name] for usage in usages])
        if isinstance(value, Mapping)
        else sum([usage[name] for usage in usages])
        for name, value in usages[0].items()
    }


def prompt_logprobs_json(tokens: Sequence[TokenLogprob]) -> Mapping[str, Sequence[Json]]:
    """Return the `logprobs` of a prompt's tokens, for `TurnRequest.prompt_logprobs`.

    The first token has none, whatever `tokens` says: nothing is before it. Offsets are those of the tokens' text.
    """
    decoder, offsets, seen = codecs.getincrementaldecoder("utf-8")("replace"), [], 0
    for token in tokens:
        offsets.append(seen)
        seen += len(decoder.decode(token.utf8))
    written = _logprobs_json(tokens, 0)
    return {
        "tokens": written["tokens"],
        "token_logprobs": [None, *written["token_logprobs"][1:]],
        "top_logprobs": [None, *written["top_logprobs"][1:]],
        "text_offset": offsets,
    }


class CompletionStream:
    """One streamed completion: `text_completion` events that share one id, then `[DONE]`."""

    content_type = sse.CONTENT_TYPE

    def __init__(self, request: TurnRequest, reply_id: str, created: int, prompt_ids: Ids | None = None) -> None:
        self._request, self._prompt_ids = request, prompt_ids
        self._echo = request.echo.get(ECHO, "")
        self._head = {"id": reply_id, "object": "text_completion", "created": created, "model": request.model}
        self._offsets = [len(self._echo)] * request.n

    def start(self) -> bytes:
        if not self._echo and self._prompt_ids is None:
            return b""
        more: dict[str, Any] = {} if self._prompt_ids is None else {"prompt_token_ids": self._prompt_ids.tolist()}
        if self._request.prompt_logprobs:
            more["logprobs"] = self._request.prompt_logprobs
        return b"".join(self._event(self._echo, k, **more) for k in range(self._request.n))

    def deltas(self, deltas: Sequence[Delta], choice: int = 0) -> bytes:
        """Encode pieces of the answer. Sampled tokens are in the chunk that follows them."""
        out: list[bytes] = []
        tokens: list[TokensDelta] = []
        for delta in deltas:
            if isinstance(delta, TokensDelta):
                tokens.append(delta)
            elif isinstance(delta, TextDelta):
                out.append(self._piece(delta.text, choice, tokens))
                tokens = []
        if tokens:
            out.append(self._piece("", choice, tokens))
        return b"".join(out)

    def keepalive(self) -> bytes:
        return sse.KEEPALIVE

    def finish(self, answers: Sequence[Answer]) -> bytes:
        ends = (self._event("", k, finish_reason(answer.interaction)) for k, answer in enumerate(answers))
        out = b"".join(ends)
        if self._request.include_usage:
            out += sse.data({**self._head, "choices": [], "usage": usage_json(answers)})
        return out + sse.DONE

    def error(self, error: ProxyError) -> bytes:
        return sse.data(openai_error(error))

    def _piece(self, text: str, choice: int, tokens: Sequence[TokensDelta]) -> bytes:
        more: dict[str, Any] = {}
        if self._request.return_token_ids and tokens:
            more["token_ids"] = [token for delta in tokens for token in delta.ids]
        if entries := [entry for delta in tokens for entry in delta.logprobs]:
            more["logprobs"] = _logprobs_json(entries, self._offsets[choice])
            self._offsets[choice] += sum(len(_shown(entry)) for entry in entries)
        return self._event(text, choice, **more)

    def _event(self, text: str, index: int, finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": finish, **more}
        payload = {**self._head, "choices": [choice]}
        if self._request.include_usage:
            payload["usage"] = None
        return sse.data(payload)


def _logprobs_json(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return the logprobs of `tokens`. The first begins after `offset` characters of the text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(_shown(token))
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{other.text: other.logprob for other in (*token.top, token)} for token in tokens],
        "text_offset": offsets,
    }


def _shown(token: TokenLogprob) -> str:
    return token.utf8.decode("utf-8", "replace")
