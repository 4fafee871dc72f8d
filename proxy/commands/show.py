"""`tokengrove show`: a list of sessions or groups; or one session: its tree, a turn, its samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
import typer.core

from proxy.commands.database_url import ConfigFile, DatabaseUrl
from proxy.commands.listed_sessions import LIMIT, NOT_OF_GROUPS, ListFlags, print_groups, print_sessions
from proxy.commands.session_source import Layout
from proxy.commands.shown_place import Place
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
    session: Annotated[str | None, typer.Argument(help="The id of a session; without it sessions are listed.")] = None,
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
    groups: Annotated[
        bool, typer.Option("--groups", help="List groups, with the distribution of their scores.")
    ] = False,
    group: Annotated[str | None, typer.Option(help="List the sessions of this group.")] = None,
    task: Annotated[str | None, typer.Option(help="List the sessions of this task.")] = None,
    status: Annotated[str | None, typer.Option(help="List sessions that are active, ended or expired.")] = None,
    reward_min: Annotated[float | None, typer.Option(help="List sessions with at least this score.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="List sessions with at most this score.")] = None,
    version: Annotated[int | None, typer.Option(help="List sessions that started with this weight version.")] = None,
    purpose: Annotated[str | None, typer.Option(help="List sessions with a turn of this purpose.")] = None,
    forked: Annotated[bool, typer.Option("--forked", help="List sessions with a fork.")] = False,
    search: Annotated[str | None, typer.Option(help="List sessions with this in the id, task or group.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"How many to list, newest first (default {LIMIT}).")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON as the API answers, in a list a line for each.")
    ] = False,
    url: Annotated[str | None, typer.Option(help="URL of a running server; without it the database is read.")] = None,
    admin_key: Annotated[
        str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")
    ] = None,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """List the newest sessions; or print one: its tree, one of its turns, or the samples that an export makes of it."""
    place = Place(url, admin_key, database_url, config)
    flags = ListFlags(group, task, status, reward_min, reward_max, version, purpose, forked, search, limit)
    _check(session, diff, turn, whole, samples, groups, flags)
    if session is None:
        with place.lists() as source:
            (print_groups if groups else print_sessions)(source, flags, as_json=as_json)
        return
    with place.session(session) as one:
        if turn is not None:
            print_turn(one, turn, whole=whole, as_json=as_json)
        elif samples:
            print_samples(one, layout, as_json=as_json)
        else:
            print_tree(one, diff=diff, as_json=as_json)


def _check(
    session: str | None, diff: bool, turn: str | None, whole: bool, samples: bool, groups: bool, flags: ListFlags
) -> None:
    """Raise ConfigurationError for flags that have no effect together."""
    of_one = {"--diff": diff, "--turn": turn is not None, "--whole": whole, "--samples": samples}
    of_list = {"--groups": groups, **flags.given()}
    for name, given in (of_one if session is None else of_list).items():
        if given:
            needs = "needs the id of a session" if session is None else "lists sessions: give it without an id"
            raise ConfigurationError(f"{name} {needs}")
    if turn is not None and (samples or diff):
        raise ConfigurationError("--turn shows one turn, with its diff: give it without --samples and --diff")
    if whole and turn is None:
        raise ConfigurationError("--whole applies only with --turn")
    if groups and (stray := next((name for name in NOT_OF_GROUPS if flags.given()[name]), None)):
        raise ConfigurationError(f"{stray} selects sessions, not groups; list the sessions with it")
