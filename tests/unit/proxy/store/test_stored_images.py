"""Images of turns: committed with them, stored once a database, and deleted with the last session that has them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import orjson
import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from proxy.commands.audit import audit
from proxy.store import backup, database, pruning
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.dump import Totals
from proxy.store.inspection import inspecting
from proxy.store.sql import images
from proxy.store.sql.deletions import delete_rows
from proxy.store.sql.images import insert_images, insert_rows
from proxy.store.sql.statement import Statement
from proxy.store.store import Store
from proxy.types import ImageFile, ImagePart, Interaction, PlacedImage, SessionRecord, ids_of
from tests.databases import execute
from tests.wide import CROSSED
from tokengrove.errors import ConfigurationError, SessionNotFound
from tokengrove.reasons import Reason

Build = Callable[..., Interaction]


def image(data: bytes, **fields: str) -> ImageFile:
    """An image file; the store does not look into its bytes."""
    return ImageFile(hashlib.sha256(data).hexdigest(), "image/png", 20, 10, data, **fields)


CAT, DOG = image(b"cat" * 1000, pixels="p1"), image(b"dog", url="http://pets.example/dog.png")


def part(file: ImageFile) -> ImagePart:
    return ImagePart(file.digest, 0, file.width, file.height)


def placed(*files: ImageFile) -> tuple[PlacedImage, ...]:
    return tuple(PlacedImage(file.digest, at, 1, file.width, file.height) for at, file in enumerate(files))


async def add(store: Store, turn: Interaction, *files: ImageFile) -> None:
    turn.images = placed(*files)
    await store.turns.append(turn, None, files)


async def sessions(store: Store, *names: str) -> None:
    for name in names:
        await store.starts.create_session(SessionRecord(name))


def stored(url: str) -> set[str]:
    return {row[0] for row in execute(url, "SELECT digest FROM images")}


async def test_the_images_of_a_turn_are_committed_with_it(store: Store, session: SessionRecord, node: Build) -> None:
    await add(store, node("a"), CAT, DOG)
    [turn] = await store.recordings.load_interactions("task-0")
    assert turn.images == placed(CAT, DOG)
    assert sorted(await store.images.read([DOG.digest, "0" * 64, CAT.digest])) == sorted([CAT, DOG._replace(url=None)])
    assert await store.images.find("task-0", CAT.digest) == CAT
    assert await store.images.pixels([CAT.digest, DOG.digest]) == {CAT.digest: "p1"}
    parts = await store.news.load_images("task-0")
    assert sorted(parts) == sorted([(part(CAT), 3000, None), (part(DOG), 3, DOG.url)])


async def test_equal_bytes_are_stored_once_and_each_session_has_its_own(
    store: Store, database_url: str, node: Build
) -> None:
    await sessions(store, "task-0", "other")
    turns = [node("a"), node("b"), node("c", session_id="other")]
    await asyncio.gather(*(add(store, turn, CAT) for turn in turns))
    assert execute(database_url, "SELECT digest, size FROM images") == [(CAT.digest, 3000)]
    assert len(execute(database_url, "SELECT 1 FROM session_images")) == 2
    assert await store.images.find("other", DOG.digest) is None


async def test_a_turn_that_is_refused_leaves_no_image(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    with pytest.raises(SessionNotFound):
        await add(store, node("a", session_id="nobody"), CAT)
    assert stored(database_url) == set()


async def test_an_image_goes_with_the_last_session_that_has_it(store: Store, database_url: str, node: Build) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"), CAT, DOG)
    await add(store, node("b", session_id="other"), CAT)
    await store.changes.delete_session("task-0")
    assert stored(database_url) == {CAT.digest}
    await store.changes.delete_session("other")
    assert stored(database_url) == set()
    assert execute(database_url, "SELECT 1 FROM session_images") == []


def test_the_repr_of_an_image_has_neither_its_bytes_nor_its_url() -> None:
    for file in (CAT, DOG):
        assert str(file.data) not in repr(file) and "example" not in repr(file)
        assert file.digest in repr(file)


async def test_prune_deletes_images_in_bounded_chunks_and_those_that_older_servers_left(
    store: Store, database_url: str, node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "_BATCH", 2)
    await sessions(store, "task-0", *"abc")
    await add(store, node("1"), CAT)
    many = [image(bytes([n])) for n in range(5)]
    for n, name in enumerate("abc"):
        await add(store, node(name, session_id=name), CAT, *many[n : n + 3])
    await store.close()
    execute(database_url, "UPDATE sessions SET ended_at = 1.0, status = 'expired' WHERE session_id IN ('a', 'b')")
    older_server(database_url, "c")
    assert pruning.prune(database_url, 0.0, dry_run=False).sessions == 2
    assert stored(database_url) == {CAT.digest}
    assert execute(database_url, "SELECT session_id FROM session_images") == [("task-0",)]


def older_server(url: str, session_id: str) -> None:
    """Delete a session as servers do that know no images."""
    for table in ("unreplied", "interactions", "sessions"):
        execute(url, f"DELETE FROM {table} WHERE session_id = '{session_id}'")


async def test_an_image_that_is_added_while_its_last_session_is_pruned_stays(postgres_url: str, node: Build) -> None:
    store = Store.open(postgres_url)
    await sessions(store, "old", "new")
    await add(store, node("a", session_id="old"), CAT, DOG)
    execute(postgres_url, "UPDATE sessions SET ended_at = 1.0, status = 'expired' WHERE session_id = 'old'")
    with transaction(postgres_url) as connection:
        insert_rows(connection, [{**CAT._asdict(), "size": 3000, "created_at": 1.0}])
        pruned = asyncio.create_task(asyncio.to_thread(pruning.prune, postgres_url, 0.0, dry_run=False))
        await one_waits(postgres_url)
        insert_images(connection, [("new", CAT)])
    assert (await pruned).sessions == 1
    assert stored(postgres_url) == {CAT.digest}
    assert await store.images.find("new", CAT.digest) == CAT
    await store.close()


async def test_an_image_that_is_deleted_while_it_is_added_is_stored_again(postgres_url: str, node: Build) -> None:
    store = Store.open(postgres_url)
    await sessions(store, "old", "new")
    await add(store, node("a", session_id="old"), CAT)
    with transaction(postgres_url) as connection:
        delete_rows(connection, ["old"])
        adding = asyncio.create_task(add(store, node("b", session_id="new"), CAT))
        await one_waits(postgres_url)
    await adding
    assert await store.images.find("new", CAT.digest) == CAT
    assert len(await store.recordings.load_interactions("new")) == 1
    await store.close()


class Deadlock(Exception):
    """As the driver tells of one."""

    sqlstate = "40P01"


async def test_a_prune_that_gives_way_to_a_server_begins_again(
    store: Store, session: SessionRecord, database_url: str, node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add(store, node("a"), CAT)
    await store.close()
    execute(database_url, "UPDATE sessions SET ended_at = 1.0, status = 'expired'")
    given_way: list[str] = []

    def delete(connection: Connection, names: Collection[str]) -> None:
        delete_rows(connection, names)
        if not given_way:
            given_way.extend(names)
            raise DBAPIError("DELETE", None, Deadlock())

    monkeypatch.setattr(pruning, "delete_rows", delete)
    assert pruning.prune(database_url, 0.0, dry_run=False).sessions == 1
    assert (given_way, stored(database_url)) == (["task-0"], set())


async def test_replicas_that_add_the_same_images_at_once_store_them_once(postgres_url: str, node: Build) -> None:
    one, other = Store.open(postgres_url), Store.open(postgres_url)
    names = [f"s{n}" for n in range(20)]
    await sessions(one, *names)
    turns = [
        add((one, other)[n % 2], node(name, session_id=name), *(CAT, DOG)[:: (1, -1)[n % 2]])
        for n, name in enumerate(names)
    ]
    await asyncio.gather(*turns)
    assert stored(postgres_url) == {CAT.digest, DOG.digest}
    assert len(execute(postgres_url, "SELECT 1 FROM session_images")) == 40
    for store in (one, other):
        assert await store.images.find("s7", DOG.digest) is not None
        await store.close()


@contextmanager
def transaction(url: str) -> Iterator[Connection]:
    """A transaction of another server, which is committed at the end of the block."""
    engine = database.writer_engine(database.parse_url(url))
    with engine.begin() as connection:
        yield connection
    engine.dispose()


async def one_waits(url: str) -> None:
    """Wait until a transaction waits for the lock of another."""
    waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    for _ in range(500):
        if await asyncio.to_thread(execute, url, waiting):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no transaction waits")


@CROSSED
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_a_turn_without_images_costs_no_statement_and_one_with_many_three(
    store: Store, session: SessionRecord, node: Build, count: int
) -> None:
    await add(store, node("first"), image(b"first"))  # compiles
    with statements() as sent:
        await add(store, node("a"), *(image(bytes([n])) for n in range(count)))
    with statements() as plain:
        await store.turns.append(node("b"))
    assert len(sent) == len(plain) + (3 if count else 0)


async def test_bytes_that_are_stored_already_are_not_sent_again(store: Store, node: Build) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"), CAT)
    with statements() as sent:
        await add(store, node("b", session_id="other"), CAT)
    assert not {id(each) for each in sent} & {id(each) for each in images._INSERT_IMAGE.values()}
    assert await store.images.find("other", CAT.digest) == CAT


@contextmanager
def statements() -> Iterator[list[Statement]]:
    """Note the statements that run."""
    run, fetch = Statement.run, Statement.fetch
    sent: list[Statement] = []

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Statement, *args: Any) -> Any:
            sent.append(self)
            return method(self, *args)

        return call

    with mock.patch.multiple(Statement, run=noted(run), fetch=noted(fetch)):
        yield sent


async def test_dumps_hold_each_image_once_and_restore_it_beside_others(
    store: Store, database_url: str, node: Build, tmp_path: Path
) -> None:
    await sessions(store, "task-0", "other")
    await add(store, node("a"), CAT, DOG)
    await add(store, node("b", session_id="other"), CAT)
    path = tmp_path / "dump.jsonl.zst"
    assert export_all(database_url, str(path), lambda _: None).images == 2
    filled = Store.open(url := f"sqlite:///{tmp_path / 'filled.db'}")
    await sessions(filled, "mine")
    await add(filled, node("mine", session_id="mine"), CAT)
    await filled.close()
    done, _ = import_all(url, path, Conflict.REFUSE, lambda _: None)
    assert (done.sessions, done.images) == (2, 2)
    assert await store.recordings.load_interactions("task-0") == await reopened(url, "task-0")
    assert links(url) == {("mine", CAT.digest, None), *links(database_url)}
    assert findings(url) == findings(database_url) == []


async def test_an_import_that_goes_on_takes_the_images_of_what_it_adds_alone(
    store: Store, database_url: str, node: Build, tmp_path: Path
) -> None:
    await sessions(store, "task-0", "other", "third")
    await add(store, node("a"), CAT, DOG)
    await add(store, node("b", session_id="other"), CAT)
    path = tmp_path / "dump.jsonl"
    export_all(database_url, str(path), lambda _: None)
    empty = Store.open(url := f"sqlite:///{tmp_path / 'empty.db'}")
    await sessions(empty, "task-0")  # a session without its turns, as nothing makes one: it is passed over
    await empty.close()
    done, passed = import_all(url, path, Conflict.SKIP, lambda _: None)
    assert (done.sessions, done.images, passed) == (2, 1, 1)
    assert links(url) == {("other", CAT.digest, None)}


async def test_the_images_of_a_session_are_imported_one_by_one_each_of_the_size_of_a_record(
    store: Store,
    session: SessionRecord,
    database_url: str,
    node: Build,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pictures = [image(bytes([each]) * 30_000) for each in range(5)]
    await add(store, node("a"), *pictures)
    path, url = tmp_path / "dump.jsonl.zst", f"sqlite:///{tmp_path / 'new.db'}"
    numbers: list[int] = []
    export_all(database_url, str(path), lambda _: None)

    def noting(connection: Connection, rows: Sequence[Mapping[str, Any]]) -> None:
        numbers.append(len(rows))
        insert_rows(connection, rows)

    monkeypatch.setattr(backup, "insert_rows", noting)
    with pytest.raises(ConfigurationError, match=r"line 2 of .* more than 40000 bytes"):
        import_all(url, path, Conflict.REFUSE, lambda _: None, 40_000)
    done, _ = import_all(url, path, Conflict.REFUSE, lambda _: None, 45_000)
    assert (done.sessions, done.images, numbers) == (1, 5, [1] * 5)
    assert stored(url) == {each.digest for each in pictures}


async def test_an_image_without_a_session_after_it_is_refused(
    store: Store, session: SessionRecord, database_url: str, node: Build, tmp_path: Path
) -> None:
    await add(store, node("a"), CAT)
    path, totals = tmp_path / "dump.jsonl", Totals()
    export_all(database_url, str(path), lambda _: None)
    lines = path.read_bytes().splitlines(keepends=True)[:-1]
    lines.append(next(line for line in lines if line.startswith(b'{"image"')))
    for line in lines:
        totals.add(line, orjson.loads(line))
    path.write_bytes(b"".join([*lines, orjson.dumps({"end": totals.to_json()}) + b"\n"]))
    with pytest.raises(ConfigurationError, match="its last image is that of no session after it"):
        import_all(f"sqlite:///{tmp_path / 'new.db'}", path, Conflict.REFUSE, lambda _: None)


async def test_a_dump_with_an_image_of_other_bytes_is_refused(
    store: Store, session: SessionRecord, database_url: str, node: Build, tmp_path: Path
) -> None:
    await add(store, node("a"), CAT)
    other = "X'00'" if "sqlite" in database_url else "'\\x00'"
    execute(database_url, f"UPDATE images SET data = {other}")
    path = tmp_path / "dump.jsonl"
    export_all(database_url, str(path), lambda _: None)
    with pytest.raises(ConfigurationError, match=f"damaged in image '{CAT.digest}': its bytes have another digest"):
        import_all(f"sqlite:///{tmp_path / 'new.db'}", path, Conflict.REFUSE, lambda _: None)


async def test_a_check_finds_images_that_are_missing_changed_loose_or_misplaced(
    store: Store, session: SessionRecord, database_url: str, node: Build
) -> None:
    await add(store, node("a", prompt_suffix=ids_of([1, 2])), CAT, DOG)
    misplaced = node("b", reason=Reason.NEW_ROOT)
    misplaced.images = (PlacedImage(CAT.digest, 2, 1), PlacedImage(CAT.digest, 2, 5), PlacedImage("ff", 3, 0))
    await store.turns.append(misplaced)
    await store.close()
    execute(database_url, f"DELETE FROM session_images WHERE digest = '{DOG.digest}'")
    execute(database_url, f"UPDATE images SET size = 7 WHERE digest = '{CAT.digest}'")
    assert findings(database_url) == [
        f"image {DOG.digest} belongs to no session: prune",
        f"image {CAT.digest} has other bytes than its digest and its size say",
        f"session task-0, turn 0, interaction a: its image {DOG.digest} is not stored",
        "session task-0, turn 1, interaction b: its image ff is not stored",
        f"session task-0, turn 1, interaction b: its image {CAT.digest} begins at token 2, before token 3 or with none",
        "session task-0, turn 1, interaction b: its image ff begins at token 3, before token 7 or with none",
    ]


def links(url: str) -> set[tuple[Any, ...]]:
    return set(execute(url, "SELECT session_id, digest, url FROM session_images"))


async def reopened(url: str, session_id: str) -> list[Interaction]:
    store = Store.open(url)
    try:
        return await store.recordings.load_interactions(session_id)
    finally:
        await store.close()


def findings(url: str) -> list[str]:
    with inspecting(url) as inspection:
        return [str(finding) for finding in audit(inspection).findings]
