"""Where `tokengrove show` reads sessions: a running server, or a database without one. Both give the same answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

from proxy.errors import ConfigurationError

if TYPE_CHECKING:
    from proxy.client import Client
    from proxy.store.inspection import Inspection
    from proxy.types import Interaction, SessionRecord


Layout = Literal["individual", "concat", "tree"]


class SessionSource(Protocol):
    """Reads one session in the forms of the API's answers."""

    def tree(self) -> dict[str, Any]:
        """The session with its turns, each `compared`."""

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        """One turn by id or number, with the parts that are named. Raises NotFound."""

    def tokens(self, name: str, layout: Layout) -> dict[str, Any]:
        """One turn with its `tokens` as an export in this layout has them. Raises NotFound."""

    def samples(self, layout: Layout) -> dict[str, Any]:
        """What an export of the session alone has in this layout, with `outline`."""


class ServedSession:
    """A session of a running server."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client, self._id = client, session_id

    def tree(self) -> dict[str, Any]:
        from proxy.client import operations

        path = f"/rl/sessions/{operations.session_path(self._id)}"
        answer: dict[str, Any] = self._client.run(operations.one(operations.Call("GET", path, params=_COMPARED)))
        return answer

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        return self._client.show_turn(self._id, name, include)

    def tokens(self, name: str, layout: Layout) -> dict[str, Any]:
        return self._client.show_turn(self._id, name, ["tokens"], layout=layout)

    def samples(self, layout: Layout) -> dict[str, Any]:
        return self._client.outline(self._id, layout=layout)


class StoredSession:
    """A session of a database, read once. Token ids have no text: a database has no tokenizer."""

    def __init__(self, record: SessionRecord, interactions: Sequence[Interaction], begun: int) -> None:
        self._record, self._interactions, self._begun = record, interactions, begun

    def tree(self) -> dict[str, Any]:
        from proxy.api.turn_json import Part, tree_json

        return tree_json(self._record, self._interactions, self._begun, {Part.COMPARED})

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        from proxy.api.turn_json import Part, find_turn, turn_json

        turn = find_turn(self._interactions, name)
        return turn_json(self._record, self._interactions, turn, frozenset(map(Part, include)))

    def tokens(self, name: str, layout: Layout) -> dict[str, Any]:
        from proxy.api.token_options import parse_token_options
        from proxy.api.turn_json import find_turn
        from proxy.api.turn_tokens import tokens_json

        turn, options = find_turn(self._interactions, name), parse_token_options({"layout": layout})
        return {**self.turn(name), "tokens": tokens_json(self._record, self._interactions, turn, options)}

    def samples(self, layout: Layout) -> dict[str, Any]:
        from proxy.api.export_request import parse_export
        from proxy.api.http import decode_json, encode_json
        from proxy.trajectory.certificate import certificate
        from proxy.trajectory.layouts import lay_out
        from proxy.trajectory.outline import outline

        options = parse_export({"layout": layout, "outline": True}).options
        laid = lay_out(self._record, self._interactions, options)
        entry = {**certificate(self._record, self._interactions, self._begun), **laid.entry, **laid.counts(options)}
        answer = {"samples": [outline(row) for row in laid.rows], "sessions": [entry]}
        plain: dict[str, Any] = decode_json(encode_json(answer))
        return plain


def stored_session(inspection: Inspection, session_id: str) -> StoredSession:
    """Read a session. Raises ConfigurationError if there is none, or if its data are damaged."""
    from proxy.store.inspection import Broken

    stored = next(iter(inspection.sessions(session_id)))
    for part in (stored.record, *stored.interactions):
        if isinstance(part, Broken):
            raise ConfigurationError(f"{part.id} cannot be read ({part.why}); run: tokengrove db check")
    whole = [node for node in stored.interactions if not isinstance(node, Broken)]
    assert not isinstance(stored.record, Broken)
    return StoredSession(stored.record, whole, len(stored.begun))


_COMPARED = {"include": "compared"}
