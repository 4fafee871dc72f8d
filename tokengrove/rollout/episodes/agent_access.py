"""The values of an episode that an agent's code may request by name. The control key is not among them."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any

from tokengrove.client import AsyncClient, AsyncSession, Client, Session
from tokengrove.rollout.episodes.episode import Episode

KNOWN = (
    *("task", "data", "session", "base_url", "root_url", "api_key", "session_id", "http_client"),
    *("task_id", "sample", "seed"),
)
"""The names that a function may request.

`task` and `data`: the row. `session`: a session with the agent's key, for asyncio in a coroutine function and blocking
in a plain function. `http_client`: an httpx client that also reaches a server in this process.
"""


def agent_access(
    names: Collection[str], episode: Episode, stack: AsyncExitStack, *, blocking: bool = False
) -> dict[str, Any]:
    """The values of these names; names that are not in `KNOWN` are ignored. `stack` closes the clients."""
    session, task = episode.session, episode.task
    known: dict[str, Any] = {
        **{"task": task.data, "data": task.data, "task_id": task.task_id},
        **{"base_url": session.base_url, "root_url": session.root_url, "api_key": session.api_key},
        **{"session_id": session.session_id, "sample": episode.plan.sample, "seed": episode.plan.seed},
    }
    if "session" in names or "http_client" in names:
        known |= _blocking(names, episode, stack) if blocking else _asyncio(names, episode, stack)
    return {name: known[name] for name in names if name in known}


def _asyncio(names: Collection[str], episode: Episode, stack: AsyncExitStack) -> dict[str, Any]:
    app, found = episode.client.app, dict[str, Any]()
    client = AsyncClient(None if app else episode.client.url, app=app)
    stack.push_async_callback(client.aclose)
    if "session" in names:
        found["session"] = AsyncSession(client, session_fields(episode))
    if "http_client" in names:
        http = found["http_client"] = client.http_client()
        stack.push_async_callback(http.aclose)
    return found


def _blocking(names: Collection[str], episode: Episode, stack: AsyncExitStack) -> dict[str, Any]:
    app, found = episode.client.app, dict[str, Any]()
    client = Client(None if app else episode.client.url, app=app)
    stack.callback(client.close)
    if "session" in names:
        found["session"] = Session(client, session_fields(episode))
    if "http_client" in names:
        http = found["http_client"] = client.http_client()
        stack.callback(http.close)
    return found


def session_fields(episode: Episode) -> dict[str, Any]:
    """The fields of a Session for the code of an agent: the agent's key also takes the place of the control key."""
    session = episode.session
    return {
        **{"session_id": session.session_id, "base_url": session.base_url, "root_url": session.root_url},
        **{"api_key": session.api_key, "control_key": session.api_key, "keys_expire_at": session.keys_expire_at},
    }
