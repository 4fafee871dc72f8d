"""The journal of a run: what was written is there after a kill at any byte, and one process writes it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest import mock

import pytest

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.runs.journal import Journal
from tokengrove.runs.slots import Entry, Slot


def entry(number: int, **more: object) -> Entry:
    result = EpisodeResult("t", number, 0, f"s{number}", reward=0.5, scores={"style": 1.0}, turns=2)
    return Entry(Slot(0, "t", number), result, **more)  # type: ignore[arg-type]


async def write(path: Path, *entries: Entry) -> None:
    journal = Journal(path)
    try:
        await asyncio.gather(*map(journal.append, entries))
    finally:
        journal.close()


def read(path: Path) -> list[Entry]:
    journal = Journal(path)
    journal.close()
    return journal.entries


async def test_entries_are_read_as_they_were_written(tmp_path: Path) -> None:
    failed = Entry(
        Slot(1, "ü\n", 3), EpisodeResult("ü\n", 3, 1, "s", failure="agent", message="no\u2028no"), again=True
    )
    await write(tmp_path / "j", entry(0), failed)
    await write(tmp_path / "j", entry(1))
    assert read(tmp_path / "j") == [entry(0), failed, entry(1)]


async def test_a_kill_at_any_byte_loses_no_entry_that_was_told_and_leaves_none_torn(tmp_path: Path) -> None:
    await write(tmp_path / "j", entry(0), entry(1))
    text = (tmp_path / "j").read_bytes()
    first = text.index(b"\n") + 1
    for cut in range(first, len(text)):
        (tmp_path / "j").write_bytes(text[:cut])
        assert read(tmp_path / "j") == [entry(0)]
        assert (tmp_path / "j").read_bytes() == text[:first]


async def test_many_entries_at_once_are_all_on_the_disk_with_few_syncs(tmp_path: Path) -> None:
    entries = [entry(number) for number in range(200)]
    with mock.patch("os.fdatasync") as sync:
        await write(tmp_path / "j", *entries)
    assert read(tmp_path / "j") == entries
    assert 1 <= sync.call_count < 200


async def test_nobody_is_told_of_an_entry_before_it_is_on_the_disk(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    full = mock.patch("os.fdatasync", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match="No space left"):
        await journal.append(entry(0))
    journal.close()


async def test_a_journal_is_open_in_one_place_only(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    with pytest.raises(ConfigurationError, match="being played by another process"):
        Journal(tmp_path / "j")
    journal.close()
    assert read(tmp_path / "j") == []


@pytest.mark.parametrize("line", ["{", "[1]", '{"pass": 0}', '{"pass": 0, "again": false, "task_id": "t"}'])
def test_a_whole_line_that_is_no_entry_is_told_and_left_alone(tmp_path: Path, line: str) -> None:
    (tmp_path / "j").write_text(f"{line}\n")
    with pytest.raises(ConfigurationError, match="line 1 is no entry"):
        Journal(tmp_path / "j")
    assert (tmp_path / "j").read_text() == f"{line}\n"
