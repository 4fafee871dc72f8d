"""Moves ended sessions between the database and the files of an archive, and deletes archived ones.

A session is in the database until a file that has it is on its disk and was read back; one transaction then deletes its
rows and notes the file. The note decides: a file may have more sessions than the notes name, after a crash or a
restore, and is then `open`. Every operation first settles such files: one with no noted session is deleted, and another
one is replaced by a copy with exactly the noted sessions. So a crash at any point loses nothing, and the next operation
leaves each session in one place.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from sqlalchemy import ColumnElement, Connection, exists, select

from proxy.store import dump
from proxy.store.archive import files
from proxy.store.archive.parquet import ArchiveReader, ArchiveWriter, Entries, digest_of
from proxy.store.backup import add_session, check_revision, session_entries
from proxy.store.inspection import BROKEN
from proxy.store.sql import archived
from proxy.store.sql.archived import State
from proxy.store.sql.starts import note_restored
from proxy.store.sql.tables import sessions
from tokengrove.errors import ConfigurationError

logger = logging.getLogger(__name__)

# A file is closed at this size, before compression. A deletion writes the file of its session again.
_FILE_BYTES = 128 << 20

T = TypeVar("T")
Progress = Callable[[int], None]


class Read(Protocol):
    """Runs a function on a connection."""

    def __call__(self, read: Callable[[Connection], T]) -> T: ...


class Access(Protocol):
    """How an archive reaches the database. All block."""

    def read(self, read: Callable[[Connection], T]) -> T:
        """Run a function on a connection that reads one snapshot."""

    def change(self, change: Callable[[Connection], T]) -> T:
        """Run a function in a transaction that writes. After a deadlock it runs again."""

    def alone(self) -> AbstractContextManager[None]:
        """Held by one archive of the database at a time. Raises ConfigurationError if another one holds it."""


@dataclass(slots=True)
class Added:
    """The archived sessions, and the number of their turns. `broken`: why others, which cannot be read, stay, by id."""

    names: list[str] = field(default_factory=list)
    turns: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    @property
    def sessions(self) -> int:
        """The number of archived sessions."""
        return len(self.names)


@dataclass(frozen=True, slots=True)
class _Written:
    """A session in a file that is being written: a digest of its entries, and its state when it was read."""

    digest: bytes
    fingerprint: bytes
    turns: int


class Archive:
    """The archive of a database, reached through `access`. `file_bytes`: the size of a file, before compression."""

    def __init__(self, access: Access, file_bytes: int = _FILE_BYTES) -> None:
        self.access, self._file_bytes = access, file_bytes

    def add(
        self,
        folder: str,
        names: Collection[str],
        still: ColumnElement[bool],
        progress: Progress = lambda _: None,
    ) -> Added:
        """Move sessions to new files in the folder with this URL. Raises ConfigurationError.

        `still`: a condition on `sessions`; one that does not meet it, or changes meanwhile, stays. `progress` is called
        with the number of sessions so far.
        """
        added, waiting = Added(), deque(names)
        self.recover()
        while waiting:
            with self.access.alone():
                self._recover()
                self._add_file(folder, waiting, still, added)
            progress(added.sessions)
        return added

    def restore(self, names: Collection[str] | None, progress: Progress = lambda _: None) -> int:
        """Move archived sessions, or all of them, back to the database; return their number.

        Raises ConfigurationError for a session that is not archived, or whose id a new session has.
        """
        done = 0
        with self.access.alone():
            self._recover()
            for file, wanted in self._by_file(names).items():
                for entries in _sessions_of(file, wanted):
                    self.access.change(partial(_restore, entries=entries, file=file))
                    done += 1
                    progress(done)
                self._settle(file)
        return done

    def copy(self, names: Collection[str], add: Callable[[Entries, int, str], None]) -> None:
        """Call `add` with the entries, the number and the place of each of these sessions, archived or not.

        Sessions that do not exist are left out. Raises ConfigurationError.
        """
        with self.access.alone():
            moved = self.access.read(lambda connection: archived.find_archived(connection, names))
            by_file: dict[str, set[str]] = defaultdict(set)
            for each in moved.values():
                by_file[each.file].add(each.session_id)
            for file, wanted in by_file.items():
                for entries in _sessions_of(file, wanted):
                    add(entries, moved[entries[-1]["session"]["session_id"]].number, file)
        for name in set(names) - moved.keys():
            if (found := self.access.read(partial(_stored, name=name))) is not None:
                add(*found, "the database")

    def delete(self, names: Collection[str], *, refusing_keys: bool) -> None:
        """Delete archived sessions: no file has them any more. `refusing_keys`: their keys stay refused.

        Raises ConfigurationError.
        """
        with self.access.alone():
            self._recover()
            for file, dropped in self._by_file(names).items():
                self._drop(file, dropped, refusing_keys)

    def recover(self) -> None:
        """Settle the files that a crash left open, and delete those that it left doomed. Raises ConfigurationError."""
        if self.access.read(archived.unsettled):
            with self.access.alone():
                self._recover()

    def _add_file(self, folder: str, waiting: deque[str], still: ColumnElement[bool], added: Added) -> None:
        """Archive sessions from the left of `waiting` until a file is full."""
        file = files.new_file(folder)
        self.access.change(lambda connection: archived.open_file(connection, file))
        written: dict[str, _Written] = {}
        with files.writing(file) as target, ArchiveWriter(target) as writer:
            while waiting and writer.size < self._file_bytes:
                name = waiting.popleft()
                loaded = self.access.read(partial(_load, name=name, still=still, written=set(writer.images)))
                if loaded is None:
                    continue
                entries, state = loaded
                try:
                    writer.add(entries)
                except BROKEN as error:
                    added.broken[name] = f"{type(error).__name__}: {error}"
                    continue
                written[name] = state
        _verify(file, {name: state.digest for name, state in written.items()})
        for name, state in written.items():
            if self._move_out(name, state, file, still):
                added.names.append(name)
                added.turns += state.turns
        self._settle(file)

    def _move_out(self, name: str, state: _Written, file: str, still: ColumnElement[bool]) -> bool:
        return self.access.change(
            lambda connection: archived.move_out(connection, name, state.fingerprint, file, still)
        )

    def _by_file(self, names: Collection[str] | None) -> Mapping[str, set[str]]:
        """The given archived sessions, or all, by file. Raises ConfigurationError for one that is not archived."""
        found: dict[str, set[str]] = defaultdict(set)
        missing = set(names or ())
        for each in self.access.read(archived.list_archived):
            if names is None or each.session_id in missing:
                found[each.file].add(each.session_id)
                missing.discard(each.session_id)
        if missing:
            raise ConfigurationError(f"session {min(missing)!r} is not archived; see: tokengrove archive list")
        return found

    def _recover(self) -> None:
        for file, state in self.access.read(archived.unsettled):
            try:
                if state is State.DOOMED:
                    self._remove(file)
                else:
                    self._settle(file)
            except ConfigurationError as error:
                if self.access.read(partial(archived.names_in, file=file)):
                    raise
                # It may be in a folder that somebody named by mistake, and must not keep the others from being used.
                logger.warning("a file without archived sessions is left: %(why)s", {"why": error})

    def _settle(self, file: str) -> None:
        """Let a file have exactly the sessions that are noted: delete it, leave it, or replace it."""
        names = self.access.read(lambda connection: archived.names_in(connection, file))
        if not names:
            if self.access.change(lambda connection: archived.doom(connection, file)):
                self._remove(file)
        elif set(_names_of(file)) == names:
            self.access.change(lambda connection: archived.set_state(connection, file, State.SETTLED))
        else:
            new = self._copy(file, names)
            self.access.change(lambda connection: archived.replace_file(connection, file, new))
            self._remove(file)

    def _drop(self, file: str, dropped: Collection[str], refusing_keys: bool) -> None:
        kept = self.access.read(lambda connection: archived.names_in(connection, file)) - set(dropped)
        new = self._copy(file, kept) if kept else None

        def forget(connection: Connection) -> None:
            archived.drop_archived(connection, dropped, refusing_keys=refusing_keys)
            if new is not None:
                archived.replace_file(connection, file, new)
            else:
                archived.doom(connection, file)

        self.access.change(forget)
        self._remove(file)

    def _copy(self, file: str, names: Collection[str]) -> str:
        """Write a new file next to another one, with some of its sessions; return its URL."""
        new, digests = files.new_file(file.rpartition("/")[0]), dict[str, bytes]()
        self.access.change(lambda connection: archived.open_file(connection, new))
        with files.writing(new) as target, ArchiveWriter(target) as writer:
            for entries in _sessions_of(file, names):
                writer.add(entries)
                digests[entries[-1]["session"]["session_id"]] = digest_of(entries)
        if missing := set(names) - digests.keys():
            raise ConfigurationError(f"the archive file {file} lacks session {min(missing)!r}")
        _verify(new, digests)
        return new

    def _remove(self, file: str) -> None:
        files.remove(file)
        self.access.change(lambda connection: archived.forget_file(connection, file))


def faults(read: Read) -> list[str]:
    """Files that cannot be read, or that do not have exactly the sessions that are noted.

    `read` runs a function on a connection. The readable parts of files are opened, not their turns.
    """
    noted: dict[str, set[str]] = defaultdict(set)
    for each in read(archived.list_archived):
        noted[each.file].add(each.session_id)
    found, open_files = [], {file for file, _ in read(archived.unsettled)}
    for file, names in noted.items():
        try:
            there = set(_names_of(file))
        except ConfigurationError as error:
            found.append(f"{len(names)} archived sessions: {error}")
            continue
        found += [f"the archived session {name} is missing in {file}" for name in sorted(names - there)]
        if there - names and file not in open_files:
            found.append(f"{file} has {len(there - names)} sessions that are not archived there")
    twice = read(_in_both)
    return found + [f"session {name} is archived, and also in the database" for name in twice]


def _load(
    connection: Connection, name: str, still: ColumnElement[bool], written: set[str]
) -> tuple[Entries, _Written] | None:
    """Read a session, without images that were `written`; None if it is gone or does not meet the condition."""
    query = select(sessions).where(sessions.c.session_id == name, still)
    row = connection.execute(query).mappings().first()
    if row is None:
        return None
    fingerprint = archived.fingerprint_of(connection, row)
    entries = list(session_entries(connection, row, written))
    return entries, _Written(digest_of(entries), fingerprint, len(entries[-1]["interactions"]))


def _stored(connection: Connection, name: str) -> tuple[Entries, int] | None:
    """The entries and the number of a session in the database; None if there is none."""
    row = connection.execute(select(sessions).where(sessions.c.session_id == name)).mappings().first()
    return None if row is None else (list(session_entries(connection, row, set())), row["number"])


def _restore(connection: Connection, entries: Entries, file: str) -> None:
    """Add a session to the database, and forget that it is archived."""
    name = entries[-1]["session"]["session_id"]
    if connection.execute(select(exists().where(sessions.c.session_id == name))).scalar():
        raise ConfigurationError(
            f"session {name!r} cannot be restored: a new session has its id; delete the new one, or keep the archive"
        )
    number = archived.move_in(connection, name)
    add_session(connection, entries, number, file)
    note_restored(connection, name)


def _sessions_of(file: str, names: Collection[str]) -> Iterator[Entries]:
    with files.reading(file) as source:
        reader = ArchiveReader(source, file)
        check_revision(reader.revision, file)
        yield from reader.sessions(names)


def _names_of(file: str) -> list[str]:
    with files.reading(file) as source:
        return ArchiveReader(source, file).names()


def _verify(file: str, digests: Mapping[str, bytes]) -> None:
    """Raise ConfigurationError unless a file has exactly the sessions with these digests."""
    found: dict[str, bytes] = {}
    for entries in _sessions_of(file, digests.keys()):
        for entry in entries:
            if "image" in entry:
                dump.decode_image(entry["image"])
        found[entries[-1]["session"]["session_id"]] = digest_of(entries)
    if found != digests:
        raise ConfigurationError(f"the archive file {file} was not stored as it was written; nothing was deleted")


def _in_both(connection: Connection) -> list[str]:
    both = select(sessions.c.session_id).where(sessions.c.session_id.in_(archived.names()))
    return sorted(connection.execute(both).scalars())
