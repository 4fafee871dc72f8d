"""The attempts and the number of turns that each worker runs, in shared memory. A worker writes only its own part.

Looking up an attempt takes no round trip. An entry exists from the start of an attempt until its end is durable.
Entries are 128-bit hashes of session and request. A lookup may miss an entry while it is being written.
"""

from __future__ import annotations

import mmap
from collections import Counter
from hashlib import blake2b

_WORD = 8
_DIGEST = 16
_HEAD = 2
"""Words at the start of each part: the number of entries, and the number of turns."""


class RunsElsewhere(Exception):
    """Another worker runs an attempt that equals this request. That worker must handle the request."""

    def __init__(self, worker: int) -> None:
        super().__init__(f"worker {worker} runs this attempt")
        self.worker = worker


class AttemptTable:
    """The shared memory of all workers. Create it before forking. `most`: the maximum number of entries per worker."""

    def __init__(self, workers: int, most: int) -> None:
        self.workers, self.most = workers, most
        self.part = _HEAD * _WORD + most * _DIGEST
        self.memory = mmap.mmap(-1, workers * self.part)
        self.words = memoryview(self.memory).cast("Q")

    def turns(self) -> int:
        """The number of turns that run on all workers."""
        return sum(self.words[worker * self.part // _WORD + 1] for worker in range(self.workers))

    def clear(self, worker: int) -> None:
        """Forget the entries of a worker that has died."""
        head = worker * self.part // _WORD
        self.words[head] = self.words[head + 1] = 0


class WorkerAttempts:
    """One worker's view of the table: it writes the entries of `worker` and reads the entries of the others."""

    def __init__(self, table: AttemptTable, worker: int) -> None:
        self._attempt_table = table
        self._start = worker * table.part
        self._others = [(number, number * table.part) for number in range(table.workers) if number != worker]
        self._entries: list[bytes] = []
        self._places: dict[bytes, int] = {}
        self._counts: Counter[bytes] = Counter()

    def add(self, digest: bytes, turns: int) -> None:
        """Add an attempt of `turns` choices. Equal attempts share an entry. Attempts beyond the limit have no entry."""
        self._count_turns(turns)
        self._counts[digest] += 1
        if self._counts[digest] == 1 and len(self._entries) < self._attempt_table.most:
            self._places[digest] = len(self._entries)
            self._entries.append(digest)
            self._write(digest)
            self._count_entries()

    def remove(self, digest: bytes, turns: int) -> None:
        """Remove an attempt that was added, once its end is durable."""
        self._count_turns(-turns)
        self._counts[digest] -= 1
        if self._counts[digest]:
            return
        del self._counts[digest]
        place = self._places.pop(digest, None)
        if place is None:
            return
        last = self._entries.pop()
        if last != digest:  # the last entry fills the gap, and is never missing meanwhile
            self._entries[place], self._places[last] = last, place
            self._write(last)
        self._count_entries()

    def find(self, digest: bytes) -> int | None:
        """The number of another worker that runs an equal attempt; None if none does, or if this worker also does."""
        if digest in self._counts:
            return None
        memory, words = self._attempt_table.memory, self._attempt_table.words
        for worker, start in self._others:
            if count := words[start // _WORD]:
                entries = start + _HEAD * _WORD
                if digest in memory[entries : entries + count * _DIGEST]:
                    return worker
        return None

    def turns_elsewhere(self) -> int:
        """The number of turns that run on other workers."""
        return sum(self._attempt_table.words[start // _WORD + 1] for _, start in self._others)

    def _write(self, digest: bytes) -> None:
        at = self._start + _HEAD * _WORD + self._places[digest] * _DIGEST
        self._attempt_table.memory[at : at + _DIGEST] = digest

    def _count_entries(self) -> None:
        self._attempt_table.words[self._start // _WORD] = len(self._entries)

    def _count_turns(self, more: int) -> None:
        self._attempt_table.words[self._start // _WORD + 1] += more


def digest_of(session_id: str, request_hash: str) -> bytes:
    """The entry of an attempt."""
    return blake2b(f"{session_id}\n{request_hash}".encode(errors="surrogatepass"), digest_size=_DIGEST).digest()
