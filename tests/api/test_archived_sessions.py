"""An archived session answers 410 with its place, its id and its keys begin nothing, and it can be deleted."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet
import pytest

from proxy.rendering.renderer import Renderer
from proxy.store.archive import parquet
from proxy.store.archive.access import archive_of
from proxy.store.archive.archiving import archive_old
from tests.databases import execute
from tests.recording_engine import RecordingEngine
from tests.support import Server, says, serving, until, user
from tests.vision import image_url, png, text_part


async def grow(folder: Path, url: str, *names: str) -> dict[str, Any]:
    """Ended and exported sessions; the keys of the first one."""
    async with serving(folder, says(*"abcdef"), database_url=url) as server:
        keys = []
        for name in names:
            keys.append(await server.ok("/rl/start_session", {"session_id": name, "task_id": "t", "group_id": "g"}))
            await server.chat([user(name)], session=name)
            await server.ok(f"/{name}/rl/end_session", {"reward": 1.0})
        await server.ok("/trajectories/export", {"session_ids": list(names)})
    return dict(keys[0])


def archive(url: str, folder: Path) -> None:
    archive_old(url, 0.0, str(folder / "archive"), dry_run=False)


async def test_every_endpoint_of_an_archived_session_says_where_it_is(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url, "s", "other")
    archive(database_url, tmp_path)
    [file] = (tmp_path / "archive").glob("*.parquet")
    async with serving(tmp_path, says("x"), database_url=database_url) as server:
        answers = [
            await server.http.get("/rl/sessions/s"),
            await server.http.get("/rl/sessions/s/interactions/0"),
            await server.post("/s/rl/set_reward", {"reward": 1.0}),
            await server.post("/s/rl/end_session", {}),
        ]
        for answer in answers:
            error = answer.json()["error"]
            assert (answer.status_code, error["code"]) == (410, "session_archived"), answer.url
            told = (f"file://{file}" in error["message"], "tokengrove archive restore s" in error["message"])
            shown = not answer.url.path.startswith("/s/")  # agents may call those
            assert told == (shown, shown), answer.url
        turn = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("more")]})
        assert (turn.status_code, turn.json()["error"]["code"]) == (410, "session_archived")
        assert [each["session_id"] for each in (await server.http.get("/rl/sessions")).json()["sessions"]] == []


async def test_agents_of_a_keyed_server_are_not_shown_the_file(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    keys = await grow(tmp_path, url, "s")
    archive(url, tmp_path)
    async with serving(tmp_path, says("x"), database_url=url, admin_key="the-admin-key") as server:
        body = {"model": "m", "messages": [user("more")]}
        bearer = {"authorization": f"Bearer {keys['api_key']}"}
        refused = await server.http.post("/v1/chat/completions", json=body, headers=bearer)
        assert refused.status_code == 401
        admin = {"authorization": "Bearer the-admin-key"}
        seen = await server.http.get("/rl/sessions/s", headers=admin)
        assert (seen.status_code, "file://" in seen.text) == (410, True)


async def test_neither_the_id_nor_a_key_of_an_archived_session_begins_another_one(
    tmp_path: Path, database_url: str
) -> None:
    keys = await grow(tmp_path, database_url, "t-0")
    archive(database_url, tmp_path)
    async with serving(tmp_path, says("x", "y"), database_url=database_url) as server:
        taken = await server.post("/rl/start_session", {"session_id": "t-0"})
        assert (taken.status_code, "is archived" in taken.text) == (400, True)
        assert (await server.ok("/rl/start_session", {"task_id": "t"}))["session_id"] == "t-1"
        bearer = {"authorization": f"Bearer {keys['api_key']}"}
        body = {"model": "m", "messages": [user("more")]}
        assert (await server.post("/v1/chat/completions", body, headers=bearer)).status_code == 401


async def test_a_series_goes_on_after_its_archived_sessions(tmp_path: Path, database_url: str) -> None:
    body = {"model": "m", "messages": [user("hi")]}
    for round_number in range(3):
        async with serving(tmp_path, says("x", "y"), database_url=database_url) as server:
            await server.ok("/v1/chat/completions", body)
            listed = (await server.http.get("/rl/sessions")).json()["sessions"]
            [name] = [each["session_id"] for each in listed]
            assert name.startswith("default") and (name == "default") == (round_number == 0)
            await server.ok("/rl/end_session", {})
            await server.ok("/trajectories/export", {"session_ids": [name]})
        archive(database_url, tmp_path)
    assert len(execute(database_url, "SELECT session_id FROM archived_sessions")) == 3


async def delete(server: Server, name: str, **headers: str) -> Any:
    return await server.http.delete(f"/rl/sessions/{name}", headers=headers)


async def test_an_archived_session_is_deleted_from_its_file_by_a_running_server(
    tmp_path: Path, database_url: str
) -> None:
    keys = await grow(tmp_path, database_url, "s", "other")
    archive(database_url, tmp_path)
    [old] = (tmp_path / "archive").glob("*.parquet")
    async with serving(tmp_path, says("new"), database_url=database_url) as server:
        gone = await delete(server, "s")
        assert (gone.status_code, gone.json()) == (200, {"interaction_count": 1})
        [file] = (tmp_path / "archive").glob("*.parquet")
        assert file != old
        assert duckdb.sql(f"SELECT DISTINCT session_id FROM '{file}'").fetchall() == [("other",)]
        assert (await delete(server, "s")).status_code == 404
        bearer = {"authorization": f"Bearer {keys['api_key']}"}
        body = {"model": "m", "messages": [user("more")]}
        assert (await server.post("/v1/chat/completions", body, headers=bearer)).status_code == 401
        await server.chat([user("again")], session="s")
        assert (await delete(server, "other")).status_code == 200
        assert not list((tmp_path / "archive").glob("*"))


async def test_a_file_that_is_gone_is_named_and_the_session_stays_archived(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url, "s", "other")
    archive(url, tmp_path)
    [file] = (tmp_path / "archive").glob("*.parquet")
    file.unlink()
    async with serving(tmp_path, says("new"), database_url=url) as server:
        refused = await delete(server, "s")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "archive_unavailable")
        assert str(file) in refused.json()["error"]["message"]
        assert (await server.http.get("/rl/sessions/s")).status_code == 410


async def test_a_session_in_memory_that_is_archived_elsewhere_says_so(tmp_path: Path, postgres_url: str) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=postgres_url) as server:
        await server.chat([user("hi")], session="s")
        await server.ok("/s/rl/end_session", {})
        await server.ok("/trajectories/export", {"session_ids": ["s"]})
        await server.ok("/rl/grant_capacity", {"n": 1})  # its commit comes after the note of the export
        await asyncio.to_thread(archive, postgres_url, tmp_path)
        assert (await server.http.get("/rl/sessions/s")).status_code == 410
        body = {"model": "m", "messages": [user("hi")]}
        assert (await server.post("/s/v1/chat/completions", body)).status_code == 410


async def test_a_server_finishes_a_deletion_that_a_crash_interrupted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url, "s", "other")
    archive(url, tmp_path)
    execute(url, "DELETE FROM archived_sessions WHERE session_id = 's'")
    execute(url, "UPDATE archive_files SET state = 'open'")
    async with serving(tmp_path, says(), database_url=url):
        await until(lambda: execute(url, "SELECT state FROM archive_files") == [("settled",)])
        [file] = (tmp_path / "archive").glob("*.parquet")
        assert duckdb.sql(f"SELECT DISTINCT session_id FROM '{file}'").fetchall() == [("other",)]


LAYOUTS: tuple[dict[str, Any], ...] = (
    {"layout": "individual"},
    {"layout": "concat", "advantages": "grpo", "replay": ["experts", "kept", "top_logprobs"]},
    {"layout": "tree"},
    {"layout": "padded", "prompt_length": 256, "response_length": 256},
    {"layout": "forest"},
    {"layout": "concat", "limit": 1},
)
FORMATS = ("json", "jsonl", "npz", "safetensors", "arrow", "parquet")


async def exported(server: Server, names: list[str], formats: tuple[str, ...] = FORMATS) -> dict[Any, Any]:
    """The bytes and the headers about the page of exports in all layouts and formats."""
    found = {}
    for at, layout in enumerate(LAYOUTS):
        for name in formats:
            body = {"session_ids": names, "format": name, **layout}
            body |= {"include": ["messages", "text"]} if at == 0 and name in ("json", "jsonl") else {}
            answer = await server.http.post("/trajectories/export", json=body)
            about = {key: value for key, value in answer.headers.items() if key.startswith("x-tokengrove")}
            assert answer.is_success, (body, answer.text)
            found[at, name] = (answer.content, about)
    return found


FILTERS: tuple[dict[str, Any], ...] = (
    {"group_id": "even"},
    {"task_id": "t-1"},
    {"status": "ended"},
    {"status": "active"},
    {"outcome": "Failed"},
    {"since": 1.0},
    {"since": 1e12},
    {"metadata": {"step": {"min": 2}}},
    {"metrics": {"x": 1}},
    {"rewarded": False},
    {"validation": "skip"},
    {"validation": "only"},
    {"purpose": ["title"]},
    {"agent": ["none"]},
    {"min_version": 1},
    {"max_version_span": 0},
    {"lineage": ["new"]},
    {"group_id": "even", "rewarded": True, "metadata": {"step": {"max": 0}}},
)


async def filtered(server: Server, names: list[str]) -> list[Any]:
    """What an export of these sessions returns, by filter: its samples, its sessions and those that were left out."""
    found = []
    for chosen in FILTERS:
        body = {"session_ids": names, "filter": chosen, "advantages": "grpo"}
        found.append((chosen, await server.ok("/trajectories/export", body)))
    return found


async def test_filters_apply_to_archived_sessions(tmp_path: Path, database_url: str) -> None:
    names = [f"s-{number}" for number in range(4)]
    async with serving(tmp_path, says(*"abcdef"), database_url=database_url) as server:
        for number, name in enumerate(names):
            group = "odd" if number % 2 else "even"
            start = {"session_id": name, "group_id": group, "task_id": f"t-{number}"}
            metadata = {"step": number, **({"validate": True} if number == 2 else {})}
            await server.ok("/rl/start_session", {**start, "metadata": metadata})
            await server.chat([user(name)], session=name)
            end = {"reward": float(number), "metrics": {"x": number}} if number < 3 else {"outcome": "Failed"}
            await server.ok(f"/{name}/rl/end_session", end)
        await server.ok("/trajectories/export", {"session_ids": names})
        before = await filtered(server, names)
    execute(database_url, "UPDATE sessions SET exported_at = NULL WHERE session_id = 's-1'")
    archive(database_url, tmp_path)
    assert len(execute(database_url, "SELECT session_id FROM archived_sessions")) == 3
    assert len({len(answer["sessions"]) for _, answer in before}) > 2, "the filters choose"
    async with serving(tmp_path, says("x"), database_url=database_url) as server:
        assert await filtered(server, names) == before


async def test_a_session_is_read_from_its_row_groups_and_those_of_its_images(
    tmp_path: Path, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_BYTES", 1)  # each turn in a group of its own
    url, names = f"sqlite:///{tmp_path / 'test.db'}", ["a", "b", "c", "d"]
    async with serving(tmp_path, says(*"abcdefgh"), vision_renderer, database_url=url) as server:
        for name in names:
            shown = image_url(png(64, 48, 1 if name in ("a", "c") else 2))
            first = [{"role": "user", "content": [text_part("See "), shown]}]
            said = await server.answer(first, name)
            await server.chat([*first, said, user("more")], name)
            await server.ok(f"/{name}/rl/end_session", {})
        await server.ok("/trajectories/export", {"session_ids": names})
    everything: list[parquet.Entries] = []
    with archive_of(url) as opened:
        opened.copy(names, lambda entries, *_: everything.append(entries))
    archive(url, tmp_path)
    [file] = (tmp_path / "archive").glob("*.parquet")
    read: list[int] = []
    rows = parquet.ArchiveReader._rows

    def counted(self: parquet.ArchiveReader, *arguments: Any) -> Iterator[Any]:
        for row in rows(self, *arguments):
            read.append(1)
            yield row

    monkeypatch.setattr(parquet.ArchiveReader, "_rows", counted)
    found: list[parquet.Entries] = []
    with archive_of(url) as opened:
        opened.copy(["c"], lambda entries, *_: found.append(entries))
    assert pyarrow.parquet.ParquetFile(file).num_row_groups == 8
    assert len(read) == 3, "the two turns of the session, and the turn that brought its image"
    assert ["image" in entry for entry in found[0]] == [True, False]
    assert found == [entries for entries in everything if entries[-1]["session"]["session_id"] == "c"]


def leftovers() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("tokengrove-archive-*")}


async def test_an_export_of_archived_sessions_is_that_from_before_byte_by_byte(
    tmp_path: Path, database_url: str, vision_renderer: Renderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    options: dict[str, Any] = {"database_url": database_url, "engine_type": RecordingEngine}
    names = ["a", "b", "c"]
    async with serving(tmp_path, says(*"abcdefghi"), vision_renderer, **options) as server:
        for name in names:
            start = {"session_id": name, "group_id": "g", "replay": ["experts", "kept", "top_logprobs"]}
            await server.ok("/rl/start_session", {**start, "alternatives": 2})
            first = [{"role": "user", "content": [text_part("See "), image_url(png(64, 48, 1))]}]
            said = await server.answer(first, name)
            await server.chat([*first, said, user("more")], name)
            await server.chat([*first, said, user("another way")], name)
            await server.ok(f"/{name}/rl/end_session", {"reward": float(ord(name)), "metrics": {"x": 1}})
        samples = (await server.ok("/trajectories/export", {"session_ids": names, "layout": "concat"}))["samples"]
        told = [
            {"turns": each["turns"], "loss_mask": each["loss_mask"], "streams": {"entropy": each["logprobs"]}}
            for each in samples
        ]
        await server.ok("/trajectories/annotate", {"trainer": "grpo", "step": 7, "samples": told})
        before = await exported(server, names)
    execute(database_url, "UPDATE sessions SET exported_at = NULL WHERE session_id = 'b'")
    archive(database_url, tmp_path)
    assert len(execute(database_url, "SELECT session_id FROM archived_sessions")) == 2
    async with serving(tmp_path, says("x"), vision_renderer, **options) as server:
        assert await exported(server, names) == before
        assert execute(database_url, "SELECT exported_at IS NOT NULL FROM sessions") != [(0,)]
        page = await server.ok("/trajectories/export", {"session_ids": names, "limit": 2})
        rest = await server.ok("/trajectories/export", {"session_ids": names, "limit": 2, "cursor": page["cursor"]})
        assert [each["session_id"] for each in (*page["sessions"], *rest["sessions"])] == names
        missing = await server.post("/trajectories/export", {"session_ids": ["a", "none"]})
        assert missing.status_code == 404
        refused = await server.post("/trajectories/export", {"session_ids": ["a"], "layout": "none"})
        assert refused.status_code == 400
        assert leftovers() == set()
    archive(database_url, tmp_path)
    with archive_of(database_url) as opened:
        opened.restore(None)
    async with serving(tmp_path, says("x"), vision_renderer, **options) as server:
        assert await exported(server, names, ("json", "npz")) == {
            key: value for key, value in before.items() if key[1] in ("json", "npz")
        }
