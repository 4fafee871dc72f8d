"""One turn of the contract as a call of the server: chat completions, in the session of the rollout.

The tree of the session keeps the exact history, whatever the agent makes of it: nothing is tokenized here.
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

    The same call again, while its answer is on the way or after it was lost, gets the same answer. Raises
    InvalidRequest for a field of `sampling` that belongs to the contract.
    """
    body = turn_body(messages, tools, sampling)
    path = f"/{session_path(session.session_id)}/v1/chat/completions"
    headers = {"idempotency-key": f"turn-{turn}-{digest(body)}"}
    reply = yield Call("POST", path, body, session.api_key, headers=headers, timeout_s=timeout_s, repeat=Repeat.NEVER)
    return CompletionText.of(reply)


def turn_body(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, sampling: Mapping[str, Any] | None
) -> dict[str, Any]:
    """The chat completion that a turn is. Raises InvalidRequest as `complete` does."""
    fields = {name: value for name, value in (sampling or {}).items() if value is not None}
    for name in _OWN:
        if name in fields:
            raise InvalidRequest(f"'sampling' must not have {name!r}: each turn of the contract sets it", param=name)
    body = {"model": "policy", **fields, "messages": list(messages), "return_completion_text": True}
    return {**body, "tools": list(tools)} if tools else body


def digest(body: Mapping[str, Any]) -> str:
    """A text that differs for turns that ask for something else."""
    text = json.dumps(body, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
