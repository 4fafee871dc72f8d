"""The sources of lists of sessions and groups for `tokengrove show`: a running server, or a database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from tokengrove.client import Client


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
        from tokengrove.client import operations

        answer: dict[str, Any] = self._client.run(operations.one(operations.Call("GET", path, params=query)))
        return answer
