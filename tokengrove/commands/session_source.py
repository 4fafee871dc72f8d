"""The sources of sessions for `tokengrove show`: a running server, or a database. Both give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from tokengrove.client import Client


Layout = Literal["individual", "concat", "tree"]


class SessionSource(Protocol):
    """Reads one session, in the form of the API's answers."""

    def tree(self) -> dict[str, Any]:
        """The session with its turns, each `compared`."""

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        """One turn, by id or number, with the parts in `include`. Raises NotFound."""

    def tokens(self, name: str, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:
        """One turn with its `tokens`, as in an export with this layout of these routes (none: the trained ones).

        Raises NotFound.
        """

    def columns(self, name: str, start: int, limit: int) -> dict[str, Any]:
        """The rows of the side columns of at most `limit` tokens of a turn, from `start` on. Raises NotFound."""

    def annotations(self) -> list[dict[str, Any]]:
        """What trainers told of each turn."""

    def samples(self, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:
        """The answer to an export of this session in this layout of these routes, with `outline`."""


class ServedSession:
    """A session of a running server."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client, self._id = client, session_id

    def tree(self) -> dict[str, Any]:
        from tokengrove.client import operations

        path = f"/rl/sessions/{operations.session_path(self._id)}"
        answer: dict[str, Any] = self._client.run(operations.one(operations.Call("GET", path, params=_COMPARED)))
        return answer

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        return self._client.show_turn(self._id, name, include)

    def tokens(self, name: str, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:
        if not routes:
            return self._client.show_turn(self._id, name, ["tokens"], layout=layout)
        return self._client.show_turn(self._id, name, ["tokens"], layout=layout, route=routes)

    def columns(self, name: str, start: int, limit: int) -> dict[str, Any]:
        answer: dict[str, Any] = self._client.show_turn(self._id, name, ["columns"], start=start, limit=limit)
        return answer["columns"]  # type: ignore[no-any-return]

    def annotations(self) -> list[dict[str, Any]]:
        return self._client.annotations(self._id)

    def samples(self, layout: Layout, routes: Sequence[str]) -> dict[str, Any]:
        if not routes:
            return self._client.outline(self._id, layout=layout)
        return self._client.outline(self._id, layout=layout, route=routes)


_COMPARED = {"include": "compared"}
