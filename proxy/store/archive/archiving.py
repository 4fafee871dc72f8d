"""`tokengrove archive` and what `tokengrove db prune` does with archived sessions."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from sqlalchemy import Connection, func, select

from proxy.store import database
from proxy.store.archive import files
from proxy.store.archive.access import archive_of
from proxy.store.archive.archive import Progress, faults
from proxy.store.inspection import Inspection
from proxy.store.pruning import Chosen, chosen
from proxy.store.sql.archived import Archived, list_archived
from proxy.store.sql.tables import interactions, sessions


@dataclass(frozen=True, slots=True)
class Result:
    """Counts of archived sessions and turns; in a dry run, of those that would be archived.

    `folder`: the URL of the archive. `kept`: sessions that are old enough but stay, because they were never exported or
    acknowledged. `broken`: why sessions that cannot be read stay, by id.
    """

    sessions: int
    turns: int
    kept: int
    folder: str = ""
    broken: dict[str, str] = field(default_factory=dict)


def archive_old(
    database_url: str, older_than_s: float, to: str | None, *, dry_run: bool, progress: Progress = lambda _: None
) -> Result:
    """Move sessions that ended more than `older_than_s` seconds ago to the folder `to`, then shrink a SQLite file.

    `to` is a path or a URL. The conditions are those of `prune`. Raises ConfigurationError.
    """
    which = chosen(time.time() - older_than_s)
    folder = "" if to is None else files.folder_url(to)
    with archive_of(database_url) as archive:
        found, turns, kept = archive.access.read(lambda connection: _count(connection, which))
        if dry_run:
            return Result(len(found), turns, kept, folder)
        added = archive.add(folder, found, which.pruned, progress)
        if added.sessions:
            database.shrink(database.parse_url(database_url))
    return Result(added.sessions, added.turns, kept, folder, added.broken)


def prune_archived(database_url: str, older_than_s: float, *, dry_run: bool) -> int:
    """Delete archived sessions that ended more than `older_than_s` seconds ago; return their number."""
    before = time.time() - older_than_s
    with archive_of(database_url) as archive:
        names = [each.session_id for each in archive.access.read(lambda connection: list_archived(connection, before))]
        if names and not dry_run:
            archive.delete(names, refusing_keys=False)
    return len(names)


def archived_in(inspection: Inspection) -> list[Archived]:
    """The archived sessions of a database in order of creation."""
    return inspection.read_now(list_archived)


def check_archive(inspection: Inspection) -> tuple[int, list[str]]:
    """The number of archived sessions, and what is wrong with the archive: see `faults`."""
    found = inspection.read_now(list_archived)
    return len(found), faults(inspection.read_now) if found else []


def _count(connection: Connection, which: Chosen) -> tuple[list[str], int, int]:
    """The sessions to archive in order of creation, the number of their turns, and the number of kept sessions."""
    query = select(sessions.c.session_id).where(which.pruned)
    found = list(connection.execute(query.order_by(sessions.c.number)).scalars())
    turns = select(func.count()).select_from(interactions).where(interactions.c.session_id.in_(query))
    kept = select(func.count()).select_from(sessions).where(which.kept)
    return found, connection.execute(turns).scalar_one(), connection.execute(kept).scalar_one()
