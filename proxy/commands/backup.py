"""`tokengrove export --all` and `tokengrove import`: back up a whole database to a file, and restore it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.commands.counting import counting
from proxy.commands.database_url import database_url_of
from proxy.store.record_limits import MAX_RECORD_BYTES
from tokengrove.commands.database_flags import ConfigFile, DatabaseUrl
from tokengrove.errors import ConfigurationError

if TYPE_CHECKING:
    from proxy.store.dump import Totals


def back_up(output: str, database_url: str | None, config: Path | None) -> None:
    """Write every session of the database to `output`, which is a file or `-` (stdout)."""
    from proxy.store.backup import export_all

    url = database_url_of(database_url, config)
    with counting("exported") as tell:
        totals = export_all(url, output, lambda done: tell(done.sessions, done.interactions))
    print(f"exported {_counted(totals)} to {output}", file=sys.stderr)


def import_(
    path: Annotated[Path, typer.Argument(help="A file that `tokengrove export --all` wrote.")],
    on_conflict: Annotated[
        str, typer.Option(help="Sessions that the database already has: refuse (import nothing) or skip them.")
    ] = "refuse",
    max_record_bytes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Most bytes of a session, image or replay column, unpacked; memory is bounded by four times that.",
        ),
    ] = MAX_RECORD_BYTES,
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
) -> None:
    """Add every session of a backup to the database, which is created or upgraded if necessary."""
    from proxy.store.backup import Conflict, import_all

    if on_conflict not in list(Conflict):
        raise ConfigurationError(f"--on-conflict {on_conflict} is not one of {', '.join(Conflict)}")
    url = database_url_of(database_url, config)
    with counting("imported") as tell:
        done, passed = import_all(
            url, path, Conflict(on_conflict), lambda done: tell(done.sessions, done.interactions), max_record_bytes
        )
    kept = f", skipped {passed} that the database already had" if passed else ""
    print(f"imported {_counted(done)}{kept}", file=sys.stderr)


def _counted(totals: Totals) -> str:
    images = f", {totals.images} images" if totals.images else ""
    columns = f", {totals.columns} replay columns" if totals.columns else ""
    return f"{totals.sessions} sessions, {totals.interactions} interactions{images}{columns}"
