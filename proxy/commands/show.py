"""`tokengrove show`: the tree of a session, why its turns forked, and what they differ in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from proxy.commands.database_url import ConfigFile, DatabaseUrl, database_url_of
from proxy.commands.session_source import Layout, ServedSession, SessionSource, stored_session, told_of
from proxy.commands.shown_session import print_samples, print_tree, print_turn
from proxy.errors import ConfigurationError

if TYPE_CHECKING:
    from proxy.reasons import Explained


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
    turn: Annotated[
        str | None, typer.Option(metavar="TURN", help="Print one turn, by its number or the id of its interaction.")
    ] = None,
    whole: Annotated[
        bool, typer.Option("--whole", help="With --turn: earlier messages in full, too, not in a line each.")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Print what each sample of an export contains, and what is not trained.")
    ] = False,
    layout: Annotated[Layout, typer.Option(help="With --samples: the layout.")] = "concat",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as the API answers.")] = False,
    url: Annotated[str | None, typer.Option(help="URL of a running server; without it the database is read.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")
    ] = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Print the tree of a session, live or ended, one of its turns, or the samples that an export makes of it."""
    if url is not None and database_url is not None:
        raise ConfigurationError("give either --url (a running server) or --database-url, not both")
    if turn is not None and (samples or diff):
        raise ConfigurationError("--turn shows one turn, with its diff: give it without --samples and --diff")
    if whole and turn is None:
        raise ConfigurationError("--whole applies only with --turn")
    with _session(url, admin_key, database_url, config, session) as source:
        if turn is not None:
            print_turn(source, turn, whole=whole, as_json=as_json)
        elif samples:
            print_samples(source, layout, as_json=as_json)
        else:
            print_tree(source, diff=diff, as_json=as_json)


@contextmanager
def _session(
    url: str | None, admin_key: str | None, database_url: str | None, config: Path | None, session_id: str
) -> Iterator[SessionSource]:
    """Open the session where the flags say."""
    if url is None:
        from proxy.store.inspection import inspecting

        with inspecting(database_url_of(database_url, config)) as inspection:
            stored = stored_session(inspection, session_id)
        yield stored
        return
    from proxy.client import Client

    with told_of(url), Client(url, admin_key) as client:
        yield ServedSession(client, session_id)
