"""Side columns: committed with their turn, deleted with their session, and kept by dumps; what `db` says of them."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from typer.testing import CliRunner

from proxy.commands.audit import Audit, audit
from proxy.side_columns.columns import DECLARED, EXPERTS, KEPT, KEPT_LOGPROBS, SideShape, loaded
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.store import schema
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.dump import Totals, entries, reading
from proxy.store.inspection import inspecting
from proxy.store.pruning import Pruned, prune
from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord, ids_of
from tests.databases import execute
from tests.wide import CROSSED
from tokengrove import commands
from tokengrove.errors import ConfigurationError, InvalidRequest, SessionNotFound
from tokengrove.reasons import Reason

Build = Callable[..., Interaction]
DAY_S = 86_400.0


def experts(start: int, number: int, seed: int = 0) -> SideColumn:
    """Rows of two layers with three experts each; the second row is missing."""
    values = np.random.default_rng(seed).integers(0, 200, (number, 2, 3)).astype(np.uint8)
    values[1:2] = 255
    return SideColumn(start, SideRows(values))


def kept(start: int) -> SideColumn:
    """The sets of two tokens: three ids, and all ids but one."""
    return SideColumn(start, SideRows(np.array([1, 5, 300, 9], np.uint16), np.array([3, -2], np.int32)))


def logprobs(start: int) -> SideColumn:
    return SideColumn(start, SideRows(np.array([-0.5, np.nan], np.float32)))


async def add(store: Store, turn: Interaction) -> dict[str, SideColumn]:
    """Append a turn with the three columns that it should have, and their notes; return them."""
    start, prompt = max(turn.prefix_length - 1, 0), turn.prompt_tokens
    whole = prompt + len(turn.output_ids)
    seed = len(turn.id) + ord(turn.id[0])
    columns = {EXPERTS: experts(start, whole - 1 - start, seed), KEPT: kept(prompt), KEPT_LOGPROBS: logprobs(prompt)}
    turn.replay = {EXPERTS: 1, KEPT: 0, KEPT_LOGPROBS: 1}
    await store.turns.append(turn, columns=columns)
    return columns


async def sessions(store: Store, *names: str) -> None:
    for name in names:
        await store.starts.create_session(SessionRecord(name))


def same(found: SideColumn, expected: SideColumn) -> bool:
    counts = [None if each.rows.counts is None else each.rows.counts.tolist() for each in (found, expected)]
    values = np.array_equal(found.rows.values, expected.rows.values, equal_nan=found.rows.values.dtype.kind == "f")
    return found.start == expected.start and values and counts[0] == counts[1]


def stored_rows(url: str) -> list[tuple[Any, ...]]:
    """All rows of the table, whole."""
    names = "interaction_id, name, session_id, start, number, dtype, shape, checksum, data"
    rows = execute(url, f"SELECT {names} FROM side_columns ORDER BY interaction_id, name")
    return [tuple(bytes(value) if isinstance(value, memoryview) else value for value in row) for row in rows]


def checked(url: str, session_id: str | None = None) -> Audit:
    with inspecting(url) as inspection:
        return audit(inspection, session_id)


def findings(url: str, session_id: str | None = None) -> list[str]:
    return [str(finding) for finding in checked(url, session_id).findings]


def quiet(_: Totals) -> None:
    pass


async def test_the_columns_of_a_turn_are_committed_with_it_and_read_by_name(
    store: Store, session: SessionRecord, node: Build
) -> None:
    columns = await add(store, node("a"))
    other = await add(store, node("b", reason=Reason.NEW_ROOT))
    found = await store.recordings.load_columns("task-0", DECLARED)
    for name, expected in (("a", columns), ("b", other)):
        assert found[name].keys() == expected.keys()
        assert all(same(found[name][each], expected[each]) for each in expected)
    only = await store.recordings.load_columns("task-0", [KEPT, "unknown"])
    assert {name: set(each) for name, each in only.items()} == {"a": {KEPT}, "b": {KEPT}}
    assert await store.recordings.load_columns("none", DECLARED) == {}
    [turn, _] = await store.recordings.load_interactions("task-0")
    assert turn.replay == {EXPERTS: 1, KEPT: 0, KEPT_LOGPROBS: 1}


async def test_the_kinds_of_columns_are_told_without_their_rows(
    store: Store, session: SessionRecord, node: Build
) -> None:
    await add(store, node("a"))
    await add(store, node("b", reason=Reason.NEW_ROOT))
    kinds = await store.recordings.column_kinds(["task-0", "none"])
    assert sorted(kinds) == [
        SideShape(KEPT, np.dtype("uint16")),
        SideShape(KEPT_LOGPROBS, np.dtype("float32")),
        SideShape(EXPERTS, np.dtype("uint8"), (2, 3)),
    ]


async def test_a_turn_that_is_not_stored_leaves_no_columns(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    await add(store, node("a"))
    before = stored_rows(database_url)
    with pytest.raises(InvalidRequest):
        await add(store, node("a"))  # its id is known
    with pytest.raises(SessionNotFound):
        await add(store, node("c", session_id="gone"))
    assert stored_rows(database_url) == before


async def test_scores_are_added_to_turns_that_exist_and_never_change(
    store: Store, database_url: str, node: Build
) -> None:
    await sessions(store, "task-0")
    await add(store, node("a"))
    name, others = "scores of a teacher", len(stored_rows(database_url))
    await store.recordings.add_scores("task-0", {"a": {name: logprobs(3)}, "gone": {name: logprobs(3)}})
    changed = SideColumn(3, SideRows(np.array([-9.0, -9.0], np.float32)))
    await store.recordings.add_scores("task-0", {"a": {name: changed}})
    found = await store.recordings.load_columns("task-0", [name])
    assert {each: list(columns) for each, columns in found.items()} == {"a": [name]}
    np.testing.assert_array_equal(found["a"][name].rows.values, logprobs(3).rows.values)
    assert len(stored_rows(database_url)) == others + 1
    assert name not in {kind.name for kind in await store.recordings.column_kinds(["task-0"])}, "they are no recording"
    assert findings(database_url) == []


async def test_the_columns_of_a_deleted_session_go_with_it(store: Store, database_url: str, node: Build) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"))
    await add(store, node("b", session_id="other"))
    await store.changes.delete_session("task-0")
    assert {row[0] for row in stored_rows(database_url)} == {"b"}


# Dumps.


async def grow(store: Store, node: Build) -> None:
    """Two sessions, one of which has a turn that continues another, and one without columns."""
    await sessions(store, "task-0", "other", "plain")
    await add(store, node("a"))
    child = {"parent_id": "a", "aligned": True, "reason": Reason.CONTINUED, "prefix_length": 5}
    await add(store, node("b", **child, prompt_suffix=ids_of([8, 9])))
    await add(store, node("c", session_id="other"))
    await store.turns.append(node("d", session_id="plain"))


@CROSSED
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
async def test_dumps_restore_every_bit_of_columns_and_have_a_line_for_each(
    store: Store, database_url: str, node: Build, tmp_path: Path, suffix: str
) -> None:
    await grow(store, node)
    path, url = tmp_path / f"dump{suffix}", f"sqlite:///{tmp_path / 'new.db'}"
    assert export_all(database_url, str(path), quiet).columns == 9
    done, _ = import_all(url, path, Conflict.REFUSE, quiet)
    assert (done.sessions, done.interactions, done.columns) == (3, 4, 9)
    assert stored_rows(url) == stored_rows(database_url)
    assert findings(url) == findings(database_url) == []
    with reading(path) as file:
        kinds = [next(iter(entry)) for entry in entries(file, "dump")][1:]
    assert kinds == ["side_column"] * 6 + ["session"] + ["side_column"] * 3 + ["session", "session"]
    again = tmp_path / "again.jsonl"
    assert export_all(url, str(again), quiet).columns == 9


async def test_an_import_that_goes_on_takes_the_columns_of_what_it_adds_alone(
    store: Store, database_url: str, node: Build, tmp_path: Path
) -> None:
    await grow(store, node)
    path = tmp_path / "dump.jsonl"
    export_all(database_url, str(path), quiet)
    filled = Store.open(url := f"sqlite:///{tmp_path / 'filled.db'}")
    await sessions(filled, "task-0")  # a session without its turns, as nothing makes one: it is passed over
    await filled.close()
    done, passed = import_all(url, path, Conflict.SKIP, quiet)
    assert (done.sessions, done.columns, passed) == (2, 3, 1)
    assert {row[0] for row in stored_rows(url)} == {"c"}


async def test_a_session_is_imported_over_the_columns_that_an_older_server_left_of_it(
    store: Store, database_url: str, node: Build, tmp_path: Path
) -> None:
    await grow(store, node)
    path = tmp_path / "dump.jsonl"
    export_all(database_url, str(path), quiet)
    await store.close()
    before = stored_rows(database_url)
    for table in ("unreplied", "interactions", "sessions"):
        execute(database_url, f"DELETE FROM {table} WHERE session_id = 'task-0'")
    done, passed = import_all(database_url, path, Conflict.SKIP, quiet)
    assert (done.columns, passed) == (6, 2)
    assert stored_rows(database_url) == before
    assert findings(database_url) == []


@CROSSED
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"checksum": "AAAA"}, "its checksum differs"),
        ({"start": 7}, "its checksum differs"),
        ({"data": None}, "data"),
        ({"mood": "good"}, "has no column mood"),
        ({"session_id": "other"}, "before session 'task-0' is of 'other'"),
    ],
)
async def test_a_dump_with_a_changed_column_is_refused(
    store: Store, database_url: str, node: Build, tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    await grow(store, node)
    path, totals, lines = tmp_path / "dump.jsonl", Totals(), []
    export_all(database_url, str(path), quiet)
    for number, line in enumerate(path.read_bytes().splitlines()[:-1]):
        entry = orjson.loads(line)
        if number == 1:
            entry["side_column"] |= change
            entry["side_column"] = {name: value for name, value in entry["side_column"].items() if value is not None}
        lines.append(orjson.dumps(entry) + b"\n")
        totals.add(lines[-1], entry)
    path.write_bytes(b"".join(lines) + orjson.dumps({"end": totals.to_json()}) + b"\n")
    with pytest.raises(ConfigurationError, match=told):
        import_all(url := f"sqlite:///{tmp_path / 'new.db'}", path, Conflict.REFUSE, quiet)
    assert execute(url, "SELECT count(*) FROM sessions") == [(0,)]
    assert stored_rows(url) == []


async def test_a_dump_without_columns_of_an_older_release_is_imported(
    store: Store, database_url: str, node: Build, tmp_path: Path
) -> None:
    await sessions(store, "task-0")
    await store.turns.append(node("a"))
    path, totals, lines = tmp_path / "dump.jsonl", Totals(), []
    export_all(database_url, str(path), quiet)
    for line in path.read_bytes().splitlines()[:-1]:
        entry = orjson.loads(line)
        if "tokengrove" in entry:
            entry |= {"format": 2, "revision": "0017"}
        lines.append(orjson.dumps(entry) + b"\n")
        totals.add(lines[-1], entry)
    trailer = orjson.dumps({"end": totals.to_json()}) + b"\n"
    assert b"column" not in trailer
    path.write_bytes(b"".join(lines) + trailer)
    done, _ = import_all(f"sqlite:///{tmp_path / 'new.db'}", path, Conflict.REFUSE, quiet)
    assert (done.sessions, done.columns) == (1, 0)


async def test_the_columns_of_a_session_are_dumped_and_imported_one_by_one_each_of_the_size_of_a_record(
    store: Store, session: SessionRecord, database_url: str, node: Build, tmp_path: Path
) -> None:
    for name in "abcde":
        rows = SideRows(np.random.default_rng(ord(name)).integers(0, 200, (4, 1500, 5)).astype(np.uint8))
        turn = node(name, reason=Reason.FIRST if name == "a" else Reason.NEW_ROOT, replay={EXPERTS: 0})
        await store.turns.append(turn, columns={EXPERTS: SideColumn(0, rows)})
    path, url = tmp_path / "dump.jsonl", f"sqlite:///{tmp_path / 'new.db'}"
    export_all(database_url, str(path), quiet)
    assert max(len(line) for line in path.read_bytes().splitlines()) < 41_000 < path.stat().st_size / 4
    with pytest.raises(ConfigurationError, match=r"line 2 of .* more than 40000 bytes"):
        import_all(url, path, Conflict.REFUSE, quiet, 40_000)
    done, _ = import_all(url, path, Conflict.REFUSE, quiet, 41_000)
    assert (done.sessions, done.columns) == (1, 5)
    assert stored_rows(url) == stored_rows(database_url)


async def test_dumps_and_imports_take_no_more_memory_for_more_columns(
    store: Store, session: SessionRecord, database_url: str, node: Build, tmp_path: Path
) -> None:
    peaks = []
    for numbers in (range(4), range(4, 20)):
        for at in numbers:
            rows = SideRows(np.random.default_rng(at).integers(0, 200, (4, 50_000, 1)).astype(np.uint8))
            turn = node(f"n{at}", reason=Reason.NEW_ROOT if at else Reason.FIRST, replay={EXPERTS: 0})
            await store.turns.append(turn, columns={EXPERTS: SideColumn(0, rows)})
        path, url = tmp_path / "dump.jsonl", f"sqlite:///{tmp_path / f'{len(peaks)}.db'}"
        schema.upgrade(url)
        exported = peak_of(lambda path=path: export_all(database_url, str(path), quiet))
        imported = peak_of(lambda path=path, url=url: import_all(url, path, Conflict.REFUSE, quiet))
        peaks.append((exported, imported))
        assert stored_rows(url) == stored_rows(database_url)
    assert peaks[1][0] < 1.25 * peaks[0][0] and peaks[1][1] < 1.25 * peaks[0][1], peaks


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that Python allocates during `work`."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# `db check`.


@CROSSED
@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE side_columns SET start = start + 1 WHERE name = 'kept'", "its column kept has other values than were"),
        ("UPDATE side_columns SET dtype = 'uint16' WHERE name = 'routed_experts'", "its checksum differs"),
        ("UPDATE side_columns SET data = substr(data, 1, 2) WHERE name = 'kept_logprobs'", "its checksum differs"),
        ("UPDATE side_columns SET interaction_id = 'x' WHERE name = 'kept'", "its checksum differs"),
        ("UPDATE side_columns SET session_id = 'gone' WHERE name = 'kept'", "kept of interaction a belongs to no"),
        ("UPDATE side_columns SET session_id = 'other'", "belongs to no interaction of the session: prune"),
        ("DELETE FROM interactions WHERE id = 'a'", "belongs to no interaction of the session: prune"),
    ],
)
async def test_a_changed_or_stray_column_is_found(
    store: Store, database_url: str, node: Build, statement: str, finding: str
) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"))
    assert findings(database_url) == []
    execute(database_url, statement)
    assert any(finding in each for each in findings(database_url)), findings(database_url)


@CROSSED
@pytest.mark.parametrize(
    ("name", "column", "finding"),
    [
        (KEPT, kept(4), "its column kept has rows of tokens 4 to 6, not of 3 to 5"),
        (KEPT_LOGPROBS, SideColumn(3, logprobs(3).rows[:1]), "kept_logprobs has rows of tokens 3 to 4, not of 3 to 5"),
        (EXPERTS, experts(0, 5), "its column routed_experts has rows of tokens 0 to 5, not of 0 to 4"),
        (EXPERTS, experts(1, 3), "its column routed_experts has rows of tokens 1 to 4, not of 0 to 4"),
        (KEPT_LOGPROBS, SideColumn(3, SideRows(np.zeros(2, np.float32))), "lacks 0 rows, but its notes say 1"),
    ],
)
async def test_a_column_that_does_not_fit_its_turn_is_found(
    store: Store, session: SessionRecord, database_url: str, node: Build, name: str, column: SideColumn, finding: str
) -> None:
    turn = node("a", replay={EXPERTS: 1, KEPT: 0, KEPT_LOGPROBS: 1})
    await store.turns.append(turn, columns={name: column})
    assert [each for each in findings(database_url) if finding in each]
    assert len(findings(database_url)) == 1


async def test_a_column_that_its_turn_does_not_note_is_found(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    await store.turns.append(node("a"), columns={KEPT: kept(3)})
    assert findings(database_url) == [
        "session task-0, turn 0, interaction a: its column kept lacks 0 rows, but its notes say None"
    ]


async def test_bytes_that_are_no_rows_are_found_though_their_checksum_matches(
    store: Store, session: SessionRecord, database_url: str, node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from proxy.store.sql import side_columns

    written = side_columns.stored
    monkeypatch.setattr(side_columns, "stored", lambda *given: written(*given)._replace(data=b"\1\1"))
    turn = node("a", replay={KEPT: 0, EXPERTS: 1})
    await store.turns.append(turn, columns={KEPT: kept(3), EXPERTS: experts(0, 4)})
    told = "session task-0, turn 0, interaction a: its column"
    assert findings(database_url) == [
        f"{told} kept cannot be decoded: ValueError: not a column of 2 kept sets",
        f"{told} routed_experts cannot be decoded: ValueError: cannot reshape array of size 2 into shape (4,2,3)",
    ]


async def test_a_column_of_a_newer_release_is_no_finding(
    store: Store, session: SessionRecord, database_url: str, node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.turns.append(node("a", replay={"moods": 0}), columns={"moods": logprobs(3)})
    assert (findings(database_url), checked(database_url).dropped) == ([], 0)


async def test_columns_that_were_dropped_or_never_had_a_row_are_no_findings_and_the_first_are_counted(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    await add(store, node("a"))
    await store.turns.append(node("b", reason=Reason.NEW_ROOT, replay={KEPT: 2, EXPERTS: 4}))
    assert (findings(database_url), checked(database_url).dropped) == ([], 0)
    execute(database_url, "DELETE FROM side_columns WHERE name != 'kept'")
    assert (findings(database_url), checked(database_url).dropped) == ([], 2)
    ran = CliRunner().invoke(commands.app, ["db", "check", "--database-url", database_url])
    assert ran.exit_code == 0
    assert "2 side columns of turns are not stored any more" in ran.output


async def test_one_column_at_a_time_is_in_memory_during_a_check(
    store: Store, session: SessionRecord, database_url: str, node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weakref import ref

    from proxy.store import inspection

    seen: list[Any] = []

    def noting(column: Any) -> SideColumn:
        assert [each() for each in seen if each() is not None] == []
        found = loaded(column)
        seen.append(ref(found.rows.values))
        return found

    monkeypatch.setattr(inspection, "loaded", noting)
    for name in "abc":
        await add(store, node(name, reason=Reason.FIRST if name == "a" else Reason.NEW_ROOT))
    assert (findings(database_url), len(seen)) == ([], 9)


# `db prune`.


async def aged(store: Store, url: str, node: Build) -> None:
    """`done` was exported long ago; `new` was just now, `unseen` never was, and `live` runs. Each has a turn."""
    names = ("done", "new", "unseen", "live")
    await sessions(store, *names)
    for name in names:
        await add(store, node(name, session_id=name))
    execute(url, "UPDATE sessions SET ended_at = 1.0, status = 'ended' WHERE session_id != 'live'")
    execute(url, "UPDATE sessions SET ended_order = number WHERE session_id != 'live'")
    execute(url, "UPDATE sessions SET ended_at = 9e9 WHERE session_id = 'new'")
    execute(url, "UPDATE sessions SET exported_at = 2.0 WHERE session_id IN ('done', 'new')")
    await store.close()


def left(url: str, table: str) -> set[str]:
    return {row[0] for row in execute(url, f"SELECT session_id FROM {table}")}


async def test_pruning_deletes_columns_with_their_sessions_and_strays(
    store: Store, database_url: str, node: Build
) -> None:
    await aged(store, database_url, node)
    execute(database_url, "UPDATE side_columns SET interaction_id = 'x', session_id = 'y' WHERE session_id = 'live'")
    [(size,)] = execute(database_url, "SELECT sum(length(data)) FROM side_columns WHERE session_id = 'done'")
    would = prune(database_url, DAY_S, dry_run=True)
    assert (would.sessions, would.interactions, would.kept) == (1, 1, 1)
    assert (would.columns, would.column_bytes, would.strays) == (3, size, 3)
    assert len(stored_rows(database_url)) == 12
    assert prune(database_url, DAY_S, dry_run=False) == would
    assert left(database_url, "sessions") == {"new", "unseen", "live"}
    assert left(database_url, "side_columns") == {"new", "unseen"}
    assert prune(database_url, DAY_S, dry_run=False) == Pruned(0, 0, 0, 1)


async def test_pruning_columns_keeps_the_turns_of_the_sessions_that_it_would_delete(
    store: Store, database_url: str, node: Build
) -> None:
    await aged(store, database_url, node)
    turns = execute(database_url, "SELECT * FROM interactions ORDER BY id")
    [(size,)] = execute(database_url, "SELECT sum(length(data)) FROM side_columns WHERE session_id = 'done'")
    would = prune(database_url, DAY_S, dry_run=True, only_columns=True)
    assert would == Pruned(1, 0, 0, 1, 3, size)
    assert len(stored_rows(database_url)) == 12
    told: list[int] = []
    assert prune(database_url, DAY_S, dry_run=False, only_columns=True, progress=told.append) == would
    assert told == [1]
    assert execute(database_url, "SELECT * FROM interactions ORDER BY id") == turns
    assert left(database_url, "side_columns") == {"new", "unseen", "live"}
    assert [each for each in findings(database_url) if "column" in each] == []
    assert checked(database_url).dropped == 3
    assert prune(database_url, DAY_S, dry_run=False, only_columns=True) == Pruned(0, 0, 0, 1)


async def test_pruning_columns_makes_a_sqlite_file_smaller(node: Build, tmp_path: Path) -> None:
    store = Store.open(url := f"sqlite:///{tmp_path / 'test.db'}", migrate=True)
    await aged(store, url, node)
    execute(url, "UPDATE side_columns SET data = randomblob(500000) WHERE session_id = 'done'")
    before = (tmp_path / "test.db").stat().st_size
    assert prune(url, DAY_S, dry_run=False, only_columns=True).column_bytes == 1_500_000
    assert (tmp_path / "test.db").stat().st_size < before - 1_400_000
    assert left(url, "sessions") == {"done", "new", "unseen", "live"}


async def test_strays_alone_are_pruned_too_and_the_file_gets_smaller(node: Build, tmp_path: Path) -> None:
    store = Store.open(url := f"sqlite:///{tmp_path / 'test.db'}", migrate=True)
    await aged(store, url, node)
    for table in ("interactions", "sessions"):  # as a server of a release without columns deletes a session
        execute(url, f"DELETE FROM {table} WHERE session_id IN ('done', 'unseen')")
    execute(url, "UPDATE side_columns SET data = randomblob(500000) WHERE session_id = 'done'")
    before = (tmp_path / "test.db").stat().st_size
    assert prune(url, DAY_S, dry_run=False) == Pruned(0, 0, 0, 0, strays=6)
    assert left(url, "side_columns") == {"new", "live"}
    assert (tmp_path / "test.db").stat().st_size < before - 1_400_000


async def test_the_command_prints_the_numbers_of_columns_and_their_bytes(
    store: Store, database_url: str, node: Build
) -> None:
    await aged(store, database_url, node)
    execute(database_url, "UPDATE side_columns SET interaction_id = 'x', session_id = 'y' WHERE session_id = 'live'")
    [(size,)] = execute(database_url, "SELECT sum(length(data)) FROM side_columns WHERE session_id = 'done'")
    prune_it = ["db", "prune", "--older-than", "1d", "--database-url", database_url]
    columns = f"3 replay columns ({size} bytes)"
    for flags, told in [
        (["--dry-run"], f"would delete 1 sessions, 1 interactions, 5 tokens, {columns}\n"),
        (["--dry-run", "--columns"], f"would delete {columns} of 1 sessions\n"),
        (["--columns"], f"deleted {columns} of 1 sessions\n"),
    ]:
        ran = CliRunner().invoke(commands.app, [*prune_it, *flags])
        assert ran.exit_code == 0
        assert ran.stdout.startswith(told)
        assert " 3 replay columns that belong to no turn\n" in ran.stdout
        assert "kept 1 sessions of that age that were never exported" in ran.stdout
