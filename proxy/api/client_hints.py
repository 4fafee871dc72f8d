"""What headers say about a turn: fields of this server, SDK retry counts, and the purpose by headers of known clients.

A malformed header of a client is ignored, never refused.

Codex        x-openai-subagent names the kind of a sub-agent, x-codex-turn-metadata (JSON) the kind of a request
Claude Code  x-claude-code-agent-id is sent only by sub-agents
opencode     x-parent-session-id is sent only by sub-agents
"""

from __future__ import annotations

import orjson

from proxy.api.headers import Headers, header
from proxy.errors import InvalidRequest
from proxy.trajectory.purpose import Purpose, purpose_of_prompt
from proxy.types import TurnRequest

_CODEX_KINDS = {"compact": Purpose.SUMMARY, "memory_consolidation": Purpose.AUX}


def add_headers(asked: TurnRequest, headers: Headers) -> None:
    """Add what the headers say to a request. Raises InvalidRequest for an unknown `x-tokengrove-purpose`."""
    asked.retry = _is_retry(headers.get(b"x-stainless-retry-count", b""))
    asked.idempotency_key = header(headers, b"idempotency-key")
    asked.state_hash = header(headers, b"x-tokengrove-state-hash")
    asked.purpose = _named_purpose(headers) or _stated_purpose(headers, asked)
    asked.agent = header(headers, b"x-tokengrove-agent")


def _is_retry(count: bytes) -> bool:
    """Whether `x-stainless-retry-count` marks a retry: the OpenAI and Anthropic SDKs send 0 with the first attempt."""
    return count.isdigit() and int(count) > 0


def _named_purpose(headers: Headers) -> str | None:
    name = header(headers, b"x-tokengrove-purpose")
    if name is not None and name not in list(Purpose):
        raise InvalidRequest(f"x-tokengrove-purpose must be one of {', '.join(Purpose)}", param="x-tokengrove-purpose")
    return name


def _stated_purpose(headers: Headers, asked: TurnRequest) -> Purpose | None:
    """The purpose that headers or prompt state; None if they state none.

    A sub-agent's summary counts as a summary: the kind of the request comes before the kind of the agent.
    """
    if _is_codex_compaction(header(headers, b"x-codex-turn-metadata")):
        return Purpose.SUMMARY
    return purpose_of_prompt(asked.messages) or _of_subagent(headers)


def _of_subagent(headers: Headers) -> Purpose | None:
    if kind := header(headers, b"x-openai-subagent"):
        return _CODEX_KINDS.get(kind, Purpose.SUBAGENT)
    return Purpose.SUBAGENT if headers.get(b"x-claude-code-agent-id") or headers.get(b"x-parent-session-id") else None


def _is_codex_compaction(metadata: str | None) -> bool:
    try:
        decoded = orjson.loads(metadata) if metadata else None
    except orjson.JSONDecodeError:
        return False
    return isinstance(decoded, dict) and decoded.get("request_kind") == "compaction"
