"""The clients with which episodes control their sessions. Each is shared by up to 16 episodes.

For each request, httpx looks at every connection of its client. One client for thousands of episodes would use more CPU
than everything else, and one for each episode would hold a connection for the whole episode.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tokengrove.client import AsyncClient
from tokengrove.rollout.episodes import Server

SHARED_BY = 16


class Clients:
    """The clients of one event loop."""

    def __init__(self) -> None:
        self._users: dict[Server, dict[AsyncClient, int]] = {}

    @contextmanager
    def client(self, server: Server) -> Iterator[AsyncClient]:
        """A client of `server` for one episode."""
        users = self._users.setdefault(server, {})
        client = min(users, key=users.__getitem__, default=None)
        if client is None or users[client] >= SHARED_BY:
            client = AsyncClient(server.url, server.admin_key)
            users[client] = 0
        users[client] += 1
        try:
            yield client
        finally:
            users[client] -= 1

    async def close(self) -> None:
        """Close all connections."""
        clients = [client for users in self._users.values() for client in users]
        self._users = {}
        for client in clients:
            await client.aclose()
