"""Prompts of a conversation: of the whole conversation, or continuing the exact tokens of an earlier prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.rollout.server_template import Tokenizes


def whole_prompt(server: Tokenizes, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
    """The ids of a conversation, with the generation prompt."""
    return server.tokenize([as_sent(message) for message in messages], **options)


def continued_prompt(
    server: Tokenizes,
    conversation: Sequence[Mapping[str, Any]],
    known_ids: Sequence[int],
    output_tokens: int,
    messages: Sequence[Mapping[str, Any]],
    **options: Any,
) -> list[int]:
    """`known_ids`, followed by what the chat template appends for `messages`, and the generation prompt.

    `known_ids` are the exact tokens of `conversation`, which ends with an answer of `output_tokens` ids; they are
    neither rendered nor changed. Tool results without an id are matched to calls in the text of the answer.
    """
    sent = [as_sent(message) for message in messages]
    unnamed = [at for at, message in enumerate(sent) if message["role"] == "tool" and "tool_call_id" not in message]
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": "tool", "arguments": "{}"}} for at in unnamed
    ]
    for at in unnamed:
        sent[at]["tool_call_id"] = f"call_{at}"
    answer = {**as_sent(conversation[-1]), **({"tool_calls": calls} if calls else {})}
    known = {"messages": len(conversation), "token_ids": list(known_ids), "output_tokens": output_tokens}
    before = [as_sent(message) for message in conversation[:-1]]
    return server.tokenize([*before, answer, *sent], continue_from=known, **options)


def as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message in the server's format: calls have ids, and their arguments are JSON texts."""
    sent = dict(message)
    if sent.get("tool_calls"):
        sent["tool_calls"] = [_call_as_sent(call, at) for at, call in enumerate(sent["tool_calls"])]
    return sent


def _call_as_sent(call: Mapping[str, Any], at: int) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if not isinstance(arguments := function.get("arguments", {}), str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    return {"id": f"call_{at}", "type": "function", **call, "function": function}
