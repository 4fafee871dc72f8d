"""Where `tokengrove show` reads lists of sessions and groups: a running server, or a database without one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from proxy.client import Client
    from proxy.store.inspection import Inspection


class ListSource(Protocol):
    """Answers the queries of `GET /rl/sessions` and `GET /rl/groups`. Raises InvalidRequest."""

    def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of sessions."""

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        """A page of groups."""


class ServedLists:
    """The lists of a running server."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        return self._get("/rl/sessions", query)

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        return self._get("/rl/groups", query)

    def _get(self, path: str, query: Mapping[str, str]) -> dict[str, Any]:
        from proxy.client import operations

        answer: dict[str, Any] = self._client.run(operations.one(operations.Call("GET", path, params=query)))
        return answer


class StoredLists:
    """The lists of a database, made by what makes the server's answers."""

    def __init__(self, inspection: Inspection) -> None:
        from proxy.api.listing import Listing
        from proxy.api.listing_endpoints import Lists
        from proxy.api.pace import Pace
        from proxy.api.summaries import Summaries

        recordings = inspection.recordings
        self._lists = Lists(recordings, Listing(recordings, Summaries(recordings, Pace(lambda: False))))

    def sessions(self, query: Mapping[str, str]) -> dict[str, Any]:
        return asyncio.run(self._lists.sessions(query))

    def groups(self, query: Mapping[str, str]) -> dict[str, Any]:
        return asyncio.run(self._lists.groups(query))
