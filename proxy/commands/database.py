"""`tokengrove db`: upgrade, check and prune a database, without a server."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from proxy.commands.counting import counting
from proxy.commands.database_url import database_url_of
from proxy.progress import show_steps
from proxy.settings.durations import age_s
from tokengrove.commands.database_flags import ConfigFile, DatabaseUrl

db_app = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Maintain the database; needs no running server."
)


@db_app.command("upgrade")
def db_upgrade(database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Upgrade the database to the newest revision, creating it if necessary. On PostgreSQL servers may run on."""
    from proxy.store import schema

    show_steps()
    print(f"the database is at revision {schema.upgrade(database_url_of(database_url, config))}")


@db_app.command("current")
def db_current(database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Print the revision of the database. The exit code is 1 if this version of tokengrove cannot run on it."""
    from proxy.store import migrations, schema

    state = schema.current(database_url_of(database_url, config))
    takes = f"; it takes servers from {state.oldest_server} on" if state.oldest_server else ""
    print(f"revision {state.revision or 'none'}, this tokengrove needs {migrations.head()}{takes}")
    if not state.served:
        raise typer.Exit(1)


@db_app.command("check")
def db_check(
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    session: Annotated[str | None, typer.Option(help="Only this session.")] = None,
    fill: Annotated[
        bool, typer.Option("--fill", help="Add the checksums that rows of older versions lack, where nothing is found.")
    ] = False,
) -> None:
    """Check that no stored session has missing, damaged or doubly trained data. Without --fill it changes nothing."""
    from proxy.commands.audit import Finding, audit
    from proxy.store.archive.archiving import check_archive
    from proxy.store.inspection import filling, inspecting

    url = database_url_of(database_url, config)
    with ExitStack() as opened:
        inspection = opened.enter_context(inspecting(url))
        archived, faults = check_archive(inspection) if session is None else (0, [])
        missing = (opened.enter_context(filling(url)),) if fill else ()
        result = audit(inspection, session, opened.enter_context(counting("checked")), *missing)
    result.findings += [Finding(None, None, fault) for fault in faults]
    for finding in result.findings:
        print(finding)
    counts = f"{result.sessions} sessions, {result.interactions} interactions, {result.output_tokens} sampled tokens"
    print(f"{counts}, {result.begun_not_ended} unfinished calls, {len(result.findings)} findings")
    if archived:
        print(f"{archived} archived sessions, whose files were opened, not read whole")
    if result.filled:
        print(f"added {result.filled} checksums")
    if lack := result.unsummed - result.filled:
        print(f"{lack} checksums are missing, of rows of older versions: {_WAY_OUT[fill]}")
    if result.dropped:
        print(f"{result.dropped} side columns of turns are not stored any more, as after db prune --columns")
    if result.findings:
        raise typer.Exit(1)


# By whether `--fill` was given.
_WAY_OUT = {False: "add them with --fill", True: "they are not added to sessions with findings"}


@db_app.command("scores")
def db_scores(database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """List sessions whose score is another than in 0.1.0, where repeated prompts made alternatives. Changes nothing."""
    from proxy.commands.rescored import rescored
    from proxy.store.inspection import inspecting

    count = 0
    with inspecting(database_url_of(database_url, config)) as inspection:
        for found in rescored(inspection):
            count += 1
            print(found)
    print(f"{count} sessions have another score; with 'reward_scope': path an export compares their paths as before")


@db_app.command("prune")
def db_prune(
    older_than: Annotated[
        str, typer.Option(help="Minimum age, counted from the end of a session: 30d, 12h, 90m or 3600s.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    columns: Annotated[
        bool, typer.Option("--columns", help="Keep these sessions, and delete only the replay columns of their turns.")
    ] = False,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Delete old sessions that were exported, acknowledged or have expired. Other sessions are never deleted."""
    from proxy.store.archive.archiving import prune_archived
    from proxy.store.pruning import prune

    url, older_than_s = database_url_of(database_url, config), age_s(older_than)
    with counting("deleted") as tell:
        pruned = prune(
            *(url, older_than_s), dry_run=dry_run, only_columns=columns, progress=lambda sessions: tell(sessions, None)
        )
    gone = 0 if columns else prune_archived(url, older_than_s, dry_run=dry_run)
    verb = "would delete" if dry_run else "deleted"
    beside = f"{pruned.columns} replay columns ({pruned.column_bytes} bytes)"
    if columns:
        print(f"{verb} {beside} of {pruned.sessions} sessions")
    else:
        counts = f"{pruned.sessions} sessions, {pruned.interactions} interactions, {pruned.tokens} tokens"
        print(f"{verb} {counts}, {beside}" if pruned.columns else f"{verb} {counts}")
    if gone:
        print(f"{verb} {gone} archived sessions from their files")
    if pruned.strays:
        print(f"{verb} {pruned.strays} replay columns that belong to no turn")
    if pruned.kept:
        print(f"kept {pruned.kept} sessions of that age that were never exported: export or acknowledge them first")
