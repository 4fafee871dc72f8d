"""The purpose of a request, from headers of known clients. A malformed header is ignored, never refused.

Codex        x-openai-subagent names the kind of a sub-agent, x-codex-turn-metadata (JSON) the kind of a request
Claude Code  x-claude-code-agent-id is sent only by sub-agents
opencode     x-parent-session-id is sent only by sub-agents
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from proxy.trajectory.purpose import Purpose, purpose_of_prompt
from proxy.types import TurnRequest

_CODEX_KINDS = {"compact": Purpose.SUMMARY, "memory_consolidation": Purpose.AUX}
_SUBAGENT_HEADERS = ("x-claude-code-agent-id", "x-parent-session-id")


def stated_purpose(headers: Mapping[str, str], request: TurnRequest) -> Purpose | None:
    """The purpose that headers or prompt state; None if they state none.

    A sub-agent's summary counts as a summary: the kind of the request comes before the kind of the agent.
    """
    if _codex_request_kind(headers) == "compaction":
        return Purpose.SUMMARY
    return purpose_of_prompt(request) or _of_subagent(headers)


def _of_subagent(headers: Mapping[str, str]) -> Purpose | None:
    if kind := headers.get("x-openai-subagent"):
        return _CODEX_KINDS.get(kind, Purpose.SUBAGENT)
    return Purpose.SUBAGENT if any(headers.get(name) for name in _SUBAGENT_HEADERS) else None


def _codex_request_kind(headers: Mapping[str, str]) -> object:
    try:
        metadata = orjson.loads(headers.get("x-codex-turn-metadata") or "null")
    except orjson.JSONDecodeError:
        return None
    return metadata.get("request_kind") if isinstance(metadata, dict) else None
