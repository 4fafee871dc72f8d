"""`tokengrove export --all` and `tokengrove import`: a whole database into a file, and a file into a database."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from proxy.commands.database_url import DatabaseUrl, database_url_of
from proxy.errors import ConfigurationError


def back_up(output: str, database_url: str | None) -> None:
    from proxy.store.backup import export_all

    with _counting("exported") as progress:
        totals = export_all(database_url_of(database_url), output, progress)
    print(f"exported {totals.sessions} sessions, {totals.interactions} interactions to {output}", file=sys.stderr)


def import_(
    path: Annotated[Path, typer.Argument(help="A file that `tokengrove export --all` wrote.")],
    on_conflict: Annotated[str, typer.Option(help="For sessions that are there already: refuse or skip.")] = "refuse",
    database_url: DatabaseUrl = None,
) -> None:
    """Add every session of a backup to the database, which is made or upgraded if need be."""
    from proxy.store.backup import Conflict, import_all

    if on_conflict not in list(Conflict):
        raise ConfigurationError(f"--on-conflict {on_conflict} is not one of {', '.join(Conflict)}")
    with _counting("imported") as progress:
        done, passed = import_all(database_url_of(database_url), path, Conflict(on_conflict), progress)
    kept = f", {passed} were there already" if passed else ""
    print(f"imported {done.sessions} sessions, {done.interactions} interactions{kept}", file=sys.stderr)


@contextlib.contextmanager
def _counting(verb: str) -> Iterator[Callable[[Any], None]]:
    """A line on the terminal that counts sessions; nothing where there is no terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{verb} nothing yet") as status:
        yield lambda totals: status.update(f"{verb} {totals.sessions} sessions, {totals.interactions} interactions")
