"""The shared memory of running attempts: what one worker enters, the others find, until it is removed."""

from __future__ import annotations

import os
import random
from collections import Counter

from proxy.workers.attempt_table import AttemptTable, WorkerAttempts, digest_of


def test_the_others_find_exactly_what_a_worker_has_entered() -> None:
    chance, table = random.Random(5), AttemptTable(3, 20)
    workers = [WorkerAttempts(table, number) for number in range(3)]
    entered: list[Counter[bytes]] = [Counter() for _ in workers]
    digests = [digest_of("s", f"{n:032x}") for n in range(12)]
    for _ in range(3000):
        number, digest = chance.randrange(3), chance.choice(digests)
        if entered[number][digest] and chance.random() < 0.5:
            workers[number].remove(digest, 1)
            entered[number][digest] -= 1
        elif entered[number].total() < 20:
            workers[number].add(digest, 1)
            entered[number][digest] += 1
        for reader, worker in enumerate(workers):
            holders = [n for n in range(3) if entered[n][digest]]
            found = worker.find(digest)
            assert found is None if reader in holders or not holders else found in holders
            assert worker.turns_elsewhere() == sum(entered[n].total() for n in range(3) if n != reader)


def test_a_full_memory_enters_no_more_and_a_removed_entry_makes_room() -> None:
    table = AttemptTable(2, 2)
    one, other = WorkerAttempts(table, 0), WorkerAttempts(table, 1)
    first, second, third = (digest_of("s", name) for name in "abc")
    for digest in (first, second, third):
        one.add(digest, 1)
    assert [other.find(digest) for digest in (first, second, third)] == [0, 0, None]
    one.remove(third, 1)
    one.remove(first, 1)
    one.add(third, 1)
    assert [other.find(digest) for digest in (first, second, third)] == [None, 0, 0]


def test_the_entries_of_a_worker_that_died_are_forgotten() -> None:
    table = AttemptTable(2, 10)
    one, other = WorkerAttempts(table, 0), WorkerAttempts(table, 1)
    one.add(digest_of("s", "a"), 4)
    table.clear(0)
    assert (other.find(digest_of("s", "a")), other.turns_elsewhere()) == (None, 0)
    again = WorkerAttempts(table, 0)
    again.add(digest_of("s", "b"), 1)
    assert (other.find(digest_of("s", "b")), other.turns_elsewhere()) == (0, 1)


def test_a_forked_process_shares_the_memory() -> None:
    table = AttemptTable(2, 10)
    child = os.fork()
    if not child:
        WorkerAttempts(table, 1).add(digest_of("s", "a"), 1)
        os._exit(0)
    os.waitpid(child, 0)
    assert WorkerAttempts(table, 0).find(digest_of("s", "a")) == 1


def test_sessions_with_equal_requests_have_different_entries() -> None:
    assert digest_of("a", "b") != digest_of("a\\nb", "") and digest_of("s1", "x") != digest_of("s2", "x")
