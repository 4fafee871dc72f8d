"""Sub-agents that have sessions of their own in their client, and belong to the session of the agent that called them.

opencode's sub-agents name the session of their caller with most requests, but not with the one for a summary of their
own conversation. So the caller of each sub-agent is remembered, in memory and for this process.
"""

from __future__ import annotations

# The most remembered sub-agents. A client that is not trusted is none of an open server's.
_MAX_REMEMBERED = 4096
# Sub-agents call sub-agents a few levels deep; a client could state a circle.
_MAX_LEVELS = 8


class ClientFamilies:
    """The caller of each sub-agent, both by the ids that the client gives to its sessions."""

    def __init__(self) -> None:
        self._callers: dict[str, str] = {}

    def session_of(self, named: str, sub_agent: str | None) -> str:
        """The session of the agent that `named` belongs to. `sub_agent`: a sub-agent that `named` has called."""
        callers = self._callers
        if sub_agent is not None and sub_agent != named and callers.get(sub_agent) != named:
            if len(callers) >= _MAX_REMEMBERED:
                callers.clear()
            callers[sub_agent] = named
        for _ in range(_MAX_LEVELS):
            if (caller := callers.get(named)) is None:
                break
            named = caller
        return named
