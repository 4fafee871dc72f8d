"""`tokengrove archive`: moves old sessions to Parquet files and back, without a server."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.commands.counting import counting
from proxy.commands.database_url import database_url_of
from proxy.settings.durations import age_s
from tokengrove.commands.database_flags import ConfigFile, DatabaseUrl
from tokengrove.errors import ConfigurationError

archive_app = typer.Typer(
    rich_markup_mode=None,
    help="Move old sessions to Parquet files, and back. The files are read by DuckDB and by exports of a server.",
)


@archive_app.callback(invoke_without_command=True)
def archive(
    context: typer.Context,
    older_than: Annotated[
        str | None, typer.Option(help="Minimum age, counted from the end of a session: 30d, 12h, 90m or 3600s.")
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="The folder of the files: a path, or a URL that fsspec knows: s3://...")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be archived.")] = False,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Move sessions to Parquet files: old ones that were exported, acknowledged, withdrawn or have expired."""
    if context.invoked_subcommand is not None:
        if dry_run or any(each is not None for each in (older_than, to, database_url, config)):
            name = context.invoked_subcommand
            raise ConfigurationError(f"write flags behind the name of the command: tokengrove archive {name} ...")
        return
    if older_than is None or (to is None and not dry_run):
        raise ConfigurationError("archive needs --older-than AGE and --to FOLDER; see tokengrove archive --help")
    from proxy.store.archive.archiving import archive_old

    url = database_url_of(database_url, config)
    with counting("archived") as tell:
        found = archive_old(url, age_s(older_than), to, dry_run=dry_run, progress=lambda sessions: tell(sessions, None))
    verb = "would archive" if dry_run else "archived"
    print(f"{verb} {found.sessions} sessions, {found.turns} turns" + (f" to {found.folder}" if found.folder else ""))
    if found.kept:
        print(f"kept {found.kept} sessions of that age that were never exported: export or acknowledge them first")
    for name, why in found.broken.items():
        print(f"session {name} stays, because it cannot be read ({why}); run: tokengrove db check")
    if found.broken:
        raise typer.Exit(1)


@archive_app.command("restore")
def restore(
    sessions: Annotated[list[str] | None, typer.Argument(help="Ids of archived sessions.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Restore all archived sessions.")] = False,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Move archived sessions back to the database."""
    if bool(sessions) == everything:
        raise ConfigurationError("archive restore needs the ids of sessions, or --all")
    from proxy.store.archive.access import archive_of

    with archive_of(database_url_of(database_url, config)) as opened, counting("restored") as tell:
        done = opened.restore(sessions or None, lambda number: tell(number, None))
    print(f"restored {done} sessions")


@archive_app.command("list")
def list_(database_url: DatabaseUrl = None, config: ConfigFile = None) -> None:
    """Print the archived sessions, each with its number of turns and its file. Runs next to a server."""
    from proxy.store.archive.archiving import archived_in
    from proxy.store.inspection import inspecting

    with inspecting(database_url_of(database_url, config)) as inspection:
        for each in archived_in(inspection):
            print(f"{each.session_id}\t{each.turns}\t{each.file}")


@archive_app.command("delete")
def delete(
    sessions: Annotated[list[str], typer.Argument(help="Ids of archived sessions.")],
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Delete archived sessions from their files, like DELETE /rl/sessions/SESSION of a server."""
    from proxy.store.archive.access import archive_of

    with archive_of(database_url_of(database_url, config)) as opened:
        opened.delete(sessions, refusing_keys=True)
    print(f"deleted {len(set(sessions))} sessions")
