"""`tokengrove show`: the tree of a session, why its turns forked, and what they differ in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer
import typer.core

from proxy.commands.database_url import ConfigFile, DatabaseUrl, database_url_of
from proxy.commands.failure import fail
from proxy.errors import ConfigurationError, ProxyError

if TYPE_CHECKING:
    from rich.console import Console

    from proxy.client import Client, SessionTree
    from proxy.reasons import Explained
    from proxy.types import Interaction, SessionRecord


class ShowHelp(typer.core.TyperCommand):
    """Plain help, followed by the meaning of every reason that sessions and exports give."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # typer's own copy of click has these types
        super().format_epilog(ctx, formatter)
        for title, kind in reasons().items():
            with formatter.section(title):
                formatter.write_dl([(word.value, word.meaning) for word in kind])


def reasons() -> dict[str, type[Explained]]:
    """The words that sessions and exports use as reasons, by the question that they answer."""
    from proxy.reasons import Echo, FinishReason, Reason, Status
    from proxy.store.notes import Note
    from proxy.trajectory.compared import Differs
    from proxy.trajectory.recomputable import Unrecomputable
    from proxy.trajectory.untrained import LeftOut, Untrained

    return {
        "Where a turn stands in the tree (reason)": Reason,
        "What differs first from the nearest turn (why)": Differs,
        "What became of a turn (status)": Status,
        "Why sampling ended (finish_reason)": FinishReason,
        "What the notes of a turn say (notes)": Note,
        "What a client changed in answers that it sent back (echo in the notes)": Echo,
        "Why a token is not trained (untrained_tokens): the token": Untrained,
        "Why a session is left out of an export (left_out): it": LeftOut,
        "Why logprobs cannot be computed again (recomputable): they": Unrecomputable,
    }


def show(
    session: Annotated[str, typer.Argument(help="The id of the session.")],
    diff: Annotated[
        bool, typer.Option("--diff", help="Print for each fork the first message that differs, of both sides.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="URL of a running server; without it the database is read.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")
    ] = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Print the tree of a session, live or ended, and what each fork differs in from the nearest turn."""
    if url is not None and database_url is not None:
        raise ConfigurationError("give either --url (a running server) or --database-url, not both")
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if url is None:
        _print(_stored(database_url_of(database_url, config), session), console, diff)
        return
    from proxy.client import Client, ServerUnreachable

    try:
        with Client(url, admin_key) as client:
            _print(_Served(client, session), console, diff)
    except ProxyError as error:
        fail(error.message if isinstance(error, ServerUnreachable) else f"{url}: {error.message}")


class _Source(Protocol):
    """Where a session is read from."""

    def tree(self) -> SessionTree: ...

    def turn(self, name: str, *include: str) -> dict[str, Any]: ...


class _Served:
    """A session of a running server."""

    def __init__(self, client: Client, session_id: str) -> None:
        self._client, self._id = client, session_id

    def tree(self) -> SessionTree:
        return self._client.session_tree(self._id, ["compared"])

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        return self._client.show_turn(self._id, name, include)


class _Stored:
    """A session of a database, read once."""

    def __init__(self, record: SessionRecord, interactions: Sequence[Interaction], begun: int) -> None:
        self._record, self._interactions, self._begun = record, interactions, begun

    def tree(self) -> SessionTree:
        from proxy.api.turn_json import Part, tree_json
        from proxy.client.values import tree_of

        return tree_of(tree_json(self._record, self._interactions, self._begun, {Part.COMPARED}))

    def turn(self, name: str, *include: str) -> dict[str, Any]:
        from proxy.api.turn_json import Part, find_turn, turn_json

        turn = find_turn(self._interactions, name)
        return turn_json(self._record, self._interactions, turn, frozenset(map(Part, include)))


def _stored(url: str, session_id: str) -> _Stored:
    """Read a session. Raises ConfigurationError if there is none, or if its data are damaged."""
    from proxy.store.inspection import Broken, inspecting

    with inspecting(url) as inspection:
        stored = next(iter(inspection.sessions(session_id)))
    for part in (stored.record, *stored.interactions):
        if isinstance(part, Broken):
            raise ConfigurationError(f"{part.id} cannot be read ({part.why}); run: tokengrove db check")
    whole = [node for node in stored.interactions if not isinstance(node, Broken)]
    assert not isinstance(stored.record, Broken)
    return _Stored(stored.record, whole, len(stored.begun))


def _print(source: _Source, console: Console, diff: bool) -> None:
    from proxy.commands.forks import print_fork, summary
    from proxy.tree_view import session_tree

    tree = source.tree()
    turns = [node for node in tree.interactions if node.turn is not None]  # a failed one has no place in the tree
    forks = {node.id: node.compared for node in turns if node.compared and node.compared["nearest"]}
    shown = session_tree(tree, lambda node: summary(forks[node.id]) if node.id in forks else ())
    console.print(shown, soft_wrap=False)  # its lines are wrapped beneath their beginnings
    if not diff:
        return
    for node in turns:
        if node.id in forks:
            print_fork(source.turn, node, forks[node.id], console)
