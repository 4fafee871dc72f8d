"""Reads the headers of a turn: fields of this server, SDK retry counts, and the purpose from headers of known clients.

Malformed client headers are ignored, never refused.

Codex        x-openai-subagent names the kind of a sub-agent, x-codex-turn-metadata (JSON) the kind of a request;
             thread-id and x-codex-parent-thread-id are threads
Claude Code  x-claude-code-agent-id is sent only by sub-agents; it is equal over compactions
opencode     x-parent-session-id is sent only by sub-agents; x-session-id is equal over compactions
OpenClaw-RL  x-turn-type is `main` or `side`: uni-agent and OpenClaw-RL train only main turns
"""

from __future__ import annotations

import orjson

from proxy.api.headers import Headers
from proxy.protocols.fields import check_text
from proxy.trajectory.purpose import purpose_of_prompt
from proxy.types import Thread, TurnRequest
from tokengrove.errors import InvalidRequest
from tokengrove.options.session import Purpose

_LONGEST = 200
"""The most characters of the name of a thread. More are cut off."""
_TURN_TYPES = {"main": Purpose.MAIN, "side": Purpose.AUX}
_CODEX_KINDS = {"compact": Purpose.SUMMARY, "memory_consolidation": Purpose.AUX}


def add_headers(asked: TurnRequest, headers: Headers, agent: str | None) -> None:
    """Add the values of headers to a request, and the `agent` of its path if the headers name none.

    Raises InvalidRequest for an unknown `x-tokengrove-purpose`, and for an agent that no database can store.
    """
    # The SDKs of OpenAI and Anthropic send 0 with the first attempt. `int` refuses numbers of more than 4300 digits.
    asked.retry = (count := headers.get(b"x-stainless-retry-count", "")).isdecimal() and bool(count.strip("0"))
    asked.idempotency_key = headers.get(b"idempotency-key")
    asked.state_hash = headers.get(b"x-tokengrove-state-hash")
    asked.purpose = _purpose(headers, asked)
    asked.thread = _thread(headers)
    asked.agent = headers.get(b"x-tokengrove-agent") or (agent and check_text(agent, "agent"))


def _thread(headers: Headers) -> Thread | None:
    """The thread that the headers of a known client name. Claude Code's main agent has no name but its session."""
    if (name := headers.get(b"thread-id")) is not None:
        parent = headers.get(b"x-codex-parent-thread-id")
    elif headers.get(b"x-claude-code-session-id") is not None:
        name = headers.get(b"x-claude-code-agent-id") or ""
        parent = (headers.get(b"x-claude-code-parent-agent-id") or "") if name else None
    elif (name := headers.get(b"x-session-id")) is not None:
        parent = headers.get(b"x-parent-session-id")
    else:
        return None
    return Thread(name[:_LONGEST], parent if parent is None else parent[:_LONGEST])


def _purpose(headers: Headers, asked: TurnRequest) -> str | None:
    """The purpose that the headers or the prompt state; None if they state none.

    A sub-agent's summary counts as a summary: the kind of the request comes before the kind of the agent.
    """
    if (name := headers.get(b"x-tokengrove-purpose")) is not None:
        if name not in list(Purpose):
            known = ", ".join(Purpose)
            raise InvalidRequest(f"x-tokengrove-purpose must be one of {known}", param="x-tokengrove-purpose")
        return name
    if (metadata := headers.get(b"x-codex-turn-metadata")) and _is_compaction(metadata):
        return Purpose.SUMMARY
    if (stated := purpose_of_prompt(asked.messages)) is not None:
        return stated
    if (turn_type := headers.get(b"x-turn-type", "").lower()) in _TURN_TYPES:
        return _TURN_TYPES[turn_type]
    if kind := headers.get(b"x-openai-subagent"):
        return _CODEX_KINDS.get(kind, Purpose.SUBAGENT)
    return Purpose.SUBAGENT if headers.get(b"x-claude-code-agent-id") or headers.get(b"x-parent-session-id") else None


def _is_compaction(metadata: str) -> bool:
    try:
        decoded = orjson.loads(metadata)
    except orjson.JSONDecodeError:
        return False
    return isinstance(decoded, dict) and decoded.get("request_kind") == "compaction"
