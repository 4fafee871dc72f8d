"""`tokengrove show`: prints a list of sessions or groups, or one session: its tree, a turn, or its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
import typer.core

from tokengrove.commands.database_flags import ConfigFile, DatabaseUrl
from tokengrove.commands.listed_sessions import LIMIT, NOT_OF_GROUPS, ListFlags, print_groups, print_sessions
from tokengrove.commands.plain_help import PlainHelp
from tokengrove.commands.session_source import Layout
from tokengrove.commands.shown_place import Place
from tokengrove.commands.shown_session import print_samples, print_tokens, print_trained, print_tree, print_turn
from tokengrove.errors import ConfigurationError
from tokengrove.terminal.colouring import By


class ShowHelp(PlainHelp):
    """Help, followed by the meaning of every reason in sessions and exports."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:  # typer's own copy of click has these types
        super().format_epilog(ctx, formatter)
        from tokengrove.reasons import BY_FIELD

        for heading, words in BY_FIELD.values():
            with formatter.section(heading):
                formatter.write_dl([(word.value, word.meaning) for word in words])


def show(
    session: Annotated[str | None, typer.Argument(help="The id of a session; without it sessions are listed.")] = None,
    diff: Annotated[
        bool, typer.Option("--diff", help="Print for each fork the first message that differs, of both sides.")
    ] = False,
    turn: Annotated[
        str | None, typer.Option(metavar="TURN", help="Print one turn, by its number or the id of its interaction.")
    ] = None,
    whole: Annotated[
        bool,
        typer.Option(
            "--whole", help="With --turn: earlier messages in full, or with --tokens the prompt and all side columns."
        ),
    ] = False,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --turn: print its tokens, coloured, and its side columns.")
    ] = False,
    by: Annotated[
        By | None,
        typer.Option(help="With --tokens: colour by what is trained and why not, logprob or weight version [mask]."),
    ] = None,
    samples: Annotated[
        bool, typer.Option("--samples", help="Print what each sample of an export contains, and what is not trained.")
    ] = False,
    trained: Annotated[
        bool, typer.Option("--trained", help="Print which steps trained its turns, and what trainers told of them.")
    ] = False,
    layout: Annotated[
        Layout | None, typer.Option(help="With --samples or --tokens: the layout of the export [concat].")
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(help="With --samples or --tokens: only turns of this route [the trained ones]; repeatable."),
    ] = None,
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
    text: Annotated[
        str | None,
        typer.Option(help='List sessions with a turn that has these words and "phrases"; see --search of serve.'),
    ] = None,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="List sessions with this metadata; KEY>=NUMBER, KEY<=NUMBER; repeatable."
        ),
    ] = None,
    trained_in: Annotated[
        str | None, typer.Option(metavar="TRAINER/STEP", help="List sessions with a turn in this step of a trainer.")
    ] = None,
    order: Annotated[
        str | None,
        typer.Option(
            help="List by newest, oldest, reward, turns, forks, lost, tokens, prompt_tokens, output_tokens, duration, "
            "metadata.KEY or metrics.KEY; with - before it descending [newest]."
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help=f"How many to list (default {LIMIT}).")] = None,
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
    """List the newest sessions, or print one session: its tree, one of its turns, or its samples in an export."""
    place = Place(url, admin_key, database_url, config)
    selected = (group, task, status, reward_min, reward_max, version, purpose, forked, search, text)
    flags = ListFlags(*selected, tuple(metadata or ()), trained_in, order, limit)
    of_one = {"--diff": diff, "--turn": turn, "--whole": whole, "--tokens": tokens, "--by": by}
    _check(
        session,
        {**of_one, "--samples": samples, "--trained": trained, "--layout": layout, "--route": route or None},
        groups,
        flags,
    )
    if session is None:
        with place.lists() as source:
            (print_groups if groups else print_sessions)(source, flags, as_json=as_json)
        return
    with place.session(session) as one:
        if turn is not None and tokens:
            print_tokens(one, turn, layout or "concat", by or "mask", route or (), whole=whole, as_json=as_json)
        elif turn is not None:
            print_turn(one, turn, whole=whole, as_json=as_json)
        elif samples:
            print_samples(one, layout or "concat", route or (), as_json=as_json)
        elif trained:
            print_trained(one, as_json=as_json)
        else:
            print_tree(one, diff=diff, as_json=as_json)


def _check(session: str | None, of_one: Mapping[str, Any], groups: bool, flags: ListFlags) -> None:
    """Raise ConfigurationError for flags that do not work together. `of_one`: the flags for one session, by name."""
    given = {name for name, value in of_one.items() if value not in (None, False)}
    listing = {name for name, is_given in {"--groups": groups, **flags.given()}.items() if is_given}
    if session is None and given:
        raise ConfigurationError(f"{min(given)} needs the id of a session")
    if session is not None and listing:
        raise ConfigurationError(f"{min(listing)} is for lists of sessions: give it without an id")
    for name, needed in NEEDS.items():
        if name in given and not needed & given:
            raise ConfigurationError(f"{name} applies only with {' or '.join(sorted(needed))}")
    if "--trained" in given and (other := given & {"--samples", "--turn", "--diff"}):
        raise ConfigurationError(f"--trained shows what trainers told: give it without {min(other)}")
    if "--turn" in given and (other := given & {"--samples", "--diff"}):
        raise ConfigurationError(f"--turn shows one turn, with its diff: give it without {min(other)}")
    if groups and (strays := listing & NOT_OF_GROUPS):
        raise ConfigurationError(f"{min(strays)} selects sessions, not groups; list the sessions with it")


NEEDS = {
    "--whole": {"--turn"},
    "--tokens": {"--turn"},
    "--by": {"--tokens"},
    "--layout": {"--samples", "--tokens"},
    "--route": {"--samples", "--tokens"},
}
"""Flags that apply only with one of these others."""
