"""A dump restores equal rows in another database of either kind. Nothing is imported from a damaged dump."""

from __future__ import annotations

import base64
import os
import random
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import zstandard

from proxy.store import database, schema
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.dump import Totals
from proxy.store.sql.codec import encode_json
from tests.archives import grow_tree, quiet
from tests.conftest import Postgres
from tests.databases import execute
from tests.support import Server, says, serving, user
from tests.wide import CROSSED
from tokengrove.errors import ConfigurationError


async def grow(folder: Path, url: str) -> Any:
    """Fill a database with sessions of every kind. Returns the keys of the last one."""
    async with serving(folder, says("one", "two", "three", "vier\u00e4\U0001f600"), database_url=url) as server:
        await grow_tree(server)
        await server.post("/failed/v1/chat/completions", {"model": "m", "messages": [user("x")]})
        assert (await server.post("/failed/v1/chat/completions", {"model": "m", "messages": [user("y")]})).is_error
        await server.ok("/grant_capacity", {"n": 3})
        old = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "live"})
        keys = {**await server.ok("/live/rl/rotate_keys", {}), "old_key": old["api_key"]}
    execute(url, "INSERT INTO intents (interaction_id, session_id, begun_at) VALUES ('begun', 's', 1.5)")
    return keys


def names(folder: Path, part: str) -> list[str]:
    return [path.name for path in folder.iterdir() if part in path.name]


def plain(path: Path) -> list[Any]:
    """The entries of a dump without the time in its header and the checksum, which depends on it."""
    data = path.read_bytes()
    if path.suffix == ".zst":
        data = zstandard.ZstdDecompressor().stream_reader(data).read()
    lines = [orjson.loads(line) for line in data.splitlines()]
    lines[0].pop("created_at")
    lines[-1]["end"].pop("sha256")
    return lines


async def test_a_round_trip_through_either_database_gives_equal_dumps(
    tmp_path: Path, database_url: str, postgres: Postgres
) -> None:
    await grow(tmp_path, database_url)
    postgres_url = postgres.create_database()
    first, second, third = (tmp_path / name for name in ("1.jsonl.zst", "2.jsonl.zst", "3.jsonl"))
    totals = export_all(database_url, str(first), quiet)
    assert (totals.sessions, totals.interactions) == (3, 5)
    import_all(postgres_url, first, Conflict.REFUSE, quiet)
    export_all(postgres_url, str(second), quiet)
    again = f"sqlite:///{tmp_path / 'again.db'}"
    import_all(again, second, Conflict.REFUSE, quiet)
    export_all(again, str(third), quiet)
    assert plain(first) == plain(second) == plain(third)
    assert not names(tmp_path, ".part")


async def test_an_imported_session_continues_with_its_keys(tmp_path: Path, database_url: str) -> None:
    keys = await grow(tmp_path, database_url)
    dump = tmp_path / "dump.jsonl.zst"
    export_all(database_url, str(dump), quiet)
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}"
    import_all(url, dump, Conflict.REFUSE, quiet)
    async with (
        serving(tmp_path, says(), database_url=database_url) as old,
        serving(tmp_path, says("go on"), database_url=url) as new,
    ):
        for path in ("/rl/sessions", "/rl/sessions/s", "/rl/sessions/failed"):
            assert (await new.http.get(path)).json() == (await old.http.get(path)).json()
        body = {"session_ids": ["s", "failed", "live"], "layout": "concat"}
        assert await exported(new, body) == await exported(old, body)
        headers = {"authorization": f"Bearer {keys['api_key']}"}
        await new.ok("/v1/chat/completions", {"model": "m", "messages": [user("z")]}, headers=headers)
        assert len(await new.tree("live")) == 1
        replaced = {"authorization": f"Bearer {keys['old_key']}"}
        refused = await new.post("/v1/chat/completions", {"model": "m", "messages": [user("z")]}, headers=replaced)
        assert refused.status_code == 401


async def exported(server: Server, body: Any) -> Any:
    return await server.ok("/export_trajectories", body)


async def test_sessions_that_are_there_are_refused_or_passed_over(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    dump = tmp_path / "dump.jsonl"
    export_all(database_url, str(dump), quiet)
    with pytest.raises(ConfigurationError, match="--on-conflict skip"):
        import_all(database_url, dump, Conflict.REFUSE, quiet)
    for table in ("withdrawn_keys", "sessions"):
        execute(database_url, f"DELETE FROM {table} WHERE session_id = 'live'")
    done, passed = import_all(database_url, dump, Conflict.SKIP, quiet)
    assert (done.sessions, passed) == (1, 2)
    assert len(execute(database_url, "SELECT session_id FROM sessions")) == 3


async def test_a_dump_from_before_four_parts_of_it_were_added_is_imported(
    tmp_path: Path,
) -> None:
    url, into = (f"sqlite:///{tmp_path / name}" for name in ("from.db", "into.db"))
    await grow(tmp_path, url)
    execute(url, "INSERT INTO unreplied SELECT id, session_id FROM interactions WHERE session_id = 's' AND seq = 1")
    path, totals, lines = tmp_path / "dump.jsonl", Totals(), []
    export_all(url, str(path), quiet)
    for line in path.read_bytes().splitlines()[:-1]:
        entry = orjson.loads(line)
        if "tokengrove" in entry:
            entry |= {"format": 1, "revision": "0003"}
        if "session" in entry:
            del entry["session"]["validation"], entry["session_images"]
            entry["session"]["metadata"] = base64.b64encode(encode_json({"validate": True}) or b"").decode()
            late = {row["interaction_id"] for row in entry.pop("unreplied")}
            del entry["withdrawn_keys"]
            for row in entry["interactions"]:
                row |= {} if row["id"] in late else {"replied_at": 1.5}
        lines.append(orjson.dumps(entry) + b"\n")
        totals.add(lines[-1], entry)
    path.write_bytes(b"".join(lines) + orjson.dumps({"end": totals.to_json()}) + b"\n")
    import_all(into, path, Conflict.REFUSE, quiet)
    for table in ("interactions", "unreplied"):
        found = f"SELECT * FROM {table} ORDER BY 1"
        assert execute(into, found) == execute(url, found) != []
    assert set(execute(into, "SELECT validation FROM sessions")) == {(1,)}


async def test_imported_ends_come_after_those_that_were_there(tmp_path: Path, postgres_url: str) -> None:
    await grow(tmp_path, postgres_url)
    dump, url = tmp_path / "dump.jsonl", f"sqlite:///{tmp_path / 'other.db'}"
    export_all(postgres_url, str(dump), quiet)
    async with serving(tmp_path, says("x"), database_url=url) as server:
        await server.chat([user("a")], session="mine")
        await server.ok("/mine/rl/end_session", {})
    import_all(url, dump, Conflict.REFUSE, quiet)
    ordered = "SELECT session_id, ended_order FROM sessions WHERE ended_order IS NOT NULL ORDER BY ended_order"
    assert execute(url, ordered) == [("mine", 1), ("s", 2)]


@CROSSED
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "cut line", "flipped", "foreign", "empty"])
async def test_a_damaged_dump_is_refused_and_nothing_of_it_imported(tmp_path: Path, suffix: str, damage: str) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    dump = tmp_path / f"dump{suffix}"
    export_all(url, str(dump), quiet)
    data = dump.read_bytes()
    dump.write_bytes(
        {
            "cut": data[: len(data) // 2],
            "cut line": data[: data.rstrip(b"\n").rfind(b"\n") + 1] if suffix == ".jsonl" else data[:-9],
            "flipped": data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :],
            "foreign": b'{"a": 1}\n' * 9,
            "empty": b"",
        }[damage]
    )
    into = f"sqlite:///{tmp_path / 'into.db'}"
    with pytest.raises(ConfigurationError, match=str(dump)):
        import_all(into, dump, Conflict.REFUSE, quiet)
    assert execute(into, "SELECT count(*) FROM sessions") == [(0,)]


async def test_a_newer_dump_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    execute(url, "SELECT 1")
    dump = tmp_path / "dump.jsonl"
    totals = Totals()
    line = orjson.dumps({"tokengrove": "dump", "format": 99, "revision": "0001"}) + b"\n"
    totals.add(line, {})
    dump.write_bytes(line + orjson.dumps({"end": totals.to_json()}) + b"\n")
    with pytest.raises(ConfigurationError, match="newer tokengrove"):
        import_all(url, dump, Conflict.SKIP, quiet)


async def test_a_dump_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    with pytest.raises(ConfigurationError, match="cannot be written"):
        export_all(url, str(tmp_path / "missing" / "dump.jsonl.zst"), quiet)
    assert not names(tmp_path, "jsonl")


async def test_an_export_while_a_server_writes_is_one_state_of_it(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abc"), database_url=database_url) as server:
        await server.chat([user("a")])
        export_all(database_url, str(tmp_path / "dump.jsonl"), quiet)
        with pytest.raises(httpx.HTTPStatusError):
            (await server.http.get("/rl/sessions/none")).raise_for_status()
        await server.chat([user("b")])
    assert plain(tmp_path / "dump.jsonl")[-1]["end"] == {"sessions": 1, "interactions": 1}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
async def test_a_full_disk_leaves_no_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    (tmp_path / "full.jsonl.part").symlink_to("/dev/full")
    with pytest.raises(ConfigurationError, match="No space left"):
        export_all(url, str(tmp_path / "full.jsonl"), quiet)
    assert not names(tmp_path, "jsonl")


async def test_an_import_that_a_full_disk_refuses_is_completed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = (f"sqlite:///{tmp_path / name}" for name in ("test.db", "target.db"))
    async with serving(tmp_path, says(*"abcdefgh"), database_url=source) as server:
        for name in "abcdefgh":
            await server.chat([user(random.Random(name).randbytes(30_000).hex())], session=name)
    export_all(source, str(tmp_path / "dump.jsonl"), quiet)
    schema.upgrade(target)
    [(pages,)] = execute(target, "PRAGMA page_count")
    with monkeypatch.context() as full:
        full.setattr(database, "_WRITER_PRAGMAS", (*database._WRITER_PRAGMAS, f"max_page_count={pages + 200}"))
        with pytest.raises(ConfigurationError, match=r"disk is full; .* --on-conflict skip"):
            import_all(target, tmp_path / "dump.jsonl", Conflict.REFUSE, quiet)
    stored = len(execute(target, "SELECT * FROM interactions"))
    assert 0 < stored < 8
    assert stored == len(execute(target, "SELECT * FROM sessions"))
    done, skipped = import_all(target, tmp_path / "dump.jsonl", Conflict.SKIP, quiet)
    assert (done.sessions, skipped) == (8 - stored, stored)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("open_umask")
@pytest.mark.parametrize("name", ["dump.jsonl", "dump.jsonl.zst"])
async def test_new_databases_and_dumps_are_their_owners_alone(tmp_path: Path, name: str) -> None:
    url = f"sqlite:///{tmp_path}/new.db"
    async with serving(tmp_path, says("one"), database_url=url) as server:
        await server.chat([user("a")], session="s")
        modes = [mode(tmp_path / f"new.db{end}") for end in ("", "-wal", "-shm", ".lock")]
    assert modes == [0o600] * 4
    export_all(url, str(tmp_path / name), quiet)
    assert mode(tmp_path / name) == 0o600


@pytest.mark.usefixtures("open_umask")
async def test_databases_and_dumps_that_exist_keep_their_modes(tmp_path: Path) -> None:
    path, dump = tmp_path / "old.db", tmp_path / "dump.jsonl"
    for file in (path, dump):
        file.touch()
        file.chmod(0o640)
    url = f"sqlite:///{path}"
    async with serving(tmp_path, says("one"), database_url=url) as server:
        await server.chat([user("a")], session="s")
    export_all(url, str(dump), quiet)
    assert (mode(path), mode(dump)) == (0o640, 0o640)
    assert dump.stat().st_size
