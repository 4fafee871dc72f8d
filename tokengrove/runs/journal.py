"""The journal of a run: a line of JSON for each ended attempt, synced to disk before the attempt counts.

A process may be killed at any time. An incomplete last line is removed when the run is resumed: the attempt did not
count yet.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.runs.slots import Entry, Slot

_FIELDS = frozenset(spec.name for spec in fields(EpisodeResult))


class Journal:
    """The journal of one run, open for appending. Only one process can have it open.

    Lines that arrive during a write are written together, because a disk does few syncs per second.
    """

    def __init__(self, path: Path) -> None:
        """Open or create the journal, and repair its end.

        Raises ConfigurationError if another process has it open, or if a line is not an entry.
        """
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            self._lock()
            self.entries = list(self._read())
        except BaseException:
            os.close(self._file)
            raise
        self._waiting: SimpleQueue[tuple[bytes, Future[None]]] = SimpleQueue()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="tokengrove-journal")

    async def append(self, entry: Entry) -> None:
        """Return once the entry is on the disk, even if the caller is cancelled meanwhile. Raises OSError."""
        written: Future[None] = Future()
        self._waiting.put((orjson.dumps(_as_json(entry)) + b"\n", written))
        self._writer.submit(self._write)
        await asyncio.wrap_future(written)

    @property
    def written(self) -> bool:
        """Whether the journal has any entry."""
        return os.fstat(self._file).st_size > 0

    def close(self) -> None:
        """Wait for pending lines, and let other processes open the journal."""
        self._writer.shutdown()
        os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigurationError(f"the run in {self._path.parent} is being played by another process") from None

    def _read(self) -> Iterator[Entry]:
        text = self._path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.ftruncate(self._file, whole)
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                yield _entry(orjson.loads(line))
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                raise ConfigurationError(f"{self._path}, line {number} is no entry of a journal: {error}") from None

    def _write(self) -> None:
        """Write all waiting lines. The first of several calls also writes the lines of the others."""
        batch = [self._waiting.get() for _ in range(self._waiting.qsize())]
        if not batch:
            return
        try:
            _write_all(self._file, b"".join(line for line, _ in batch))
            os.fdatasync(self._file)
        except OSError as error:
            for _, written in batch:
                written.set_exception(error)
        else:
            for _, written in batch:
                written.set_result(None)


def _write_all(file: int, text: bytes) -> None:
    view = memoryview(text)
    while view:
        view = view[os.write(file, view) :]


def _as_json(entry: Entry) -> dict[str, Any]:
    return {"pass": entry.slot.epoch, "again": entry.again, **entry.result.as_json()}


def _entry(line: dict[str, Any]) -> Entry:
    result = EpisodeResult(**{name: value for name, value in line.items() if name in _FIELDS})
    return Entry(Slot(line["pass"], result.task_id, result.sample), result, line["again"])
