"""What known clients say in headers of their own about the purpose of a request. Never a reason to refuse one.

codex     x-openai-subagent names the kind of a sub-agent, x-codex-turn-metadata (JSON) the kind of a request
claude    x-claude-code-agent-id is there on the requests of a sub-agent only
opencode  x-parent-session-id is there on the requests of a sub-agent only
"""

from __future__ import annotations

from collections.abc import Mapping

import orjson

from proxy.trajectory.purpose import Purpose, hinted
from proxy.types import TurnRequest

_CODEX_KINDS = {"compact": Purpose.SUMMARY, "memory_consolidation": Purpose.AUX}
_SUBAGENT_HEADERS = ("x-claude-code-agent-id", "x-parent-session-id")


def told_purpose(headers: Mapping[str, str], request: TurnRequest) -> Purpose | None:
    """The purpose that headers or prompt give away; None when they say nothing.

    A sub-agent's summary is a summary: what a single request is for goes before who makes it.
    """
    if _codex_request_kind(headers) == "compaction":
        return Purpose.SUMMARY
    return hinted(request) or _of_subagent(headers)


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
