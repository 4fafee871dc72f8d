"""One turn of the contract as a call of the server: a chat completion in the session of the rollout.

The tree of the session keeps the exact history, whatever the agent does with it; nothing is tokenized here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.client.operations import GENERATE_S, Call, Repeat, StartedSession, Steps, session_path
from tokengrove.errors import InvalidRequest
from tokengrove.openenv.completion_text import CompletionText

_OWN = ("messages", "tools", "stream", "n", "return_completion_text")


def complete(
    session: StartedSession,
    turn: int,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: Mapping[str, Any] | None,
    timeout_s: float = GENERATE_S,
) -> Steps[CompletionText]:
    """Sample the assistant's turn. `sampling`: further fields of the chat completion.

    A repeated call gets the same answer, while the answer is in transit or after it was lost. Raises InvalidRequest for
    a field in `sampling` that belongs to the contract.
    """
    body = turn_body(messages, tools, sampling)
    path = f"/{session_path(session.session_id)}/v1/chat/completions"
    headers = {"idempotency-key": f"turn-{turn}-{digest(body)}"}
    reply = yield Call("POST", path, body, session.api_key, headers=headers, timeout_s=timeout_s, repeat=Repeat.NEVER)
    return CompletionText.of(reply)


def turn_body(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, sampling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The chat completion of a turn. Raises InvalidRequest like `complete`."""
    fields = {name: value for name, value in (sampling or {}).items() if value is not None}
    for name in _OWN:
        if name in fields:
            raise InvalidRequest(f"'sampling' must not have {name!r}: each turn of the contract sets it", param=name)
    body = {"model": "policy", **fields, "messages": list(messages), "return_completion_text": True}
    return {**body, "tools": list(tools)} if tools else body


def digest(body: Mapping[str, Any]) -> str:
    """A digest of a request, which differs for different requests."""
    text = json.dumps(body, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
