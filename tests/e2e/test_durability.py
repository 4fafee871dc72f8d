"""Durable before done: no fault of the server, the database or the disk loses a reply that a client received whole.

After each fault, `tokengrove db check` audits the database. TOKENGROVE_TEST_SEED repeats a run.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store.store import Store
from tests.conftest import Postgres
from tests.databases import execute
from tests.e2e.load import Load, check_database, outputs_at, sqlite_url, streamed
from tests.e2e.processes import ROOT, Process, run, server_process
from tests.exports import entries
from tests.support import user
from tests.vision import image_url, png
from tokengrove.reasons import Status

SESSIONS = 32
FLAGS = ("--engine", "scripted", "--engine-arg", "tokens=40", "--engine-arg", "chunk=4", "--replay", "top_logprobs")


@pytest.fixture
def chance() -> random.Random:
    seed = int(os.environ.get("TOKENGROVE_TEST_SEED", random.randrange(10**6)))
    print(f"TOKENGROVE_TEST_SEED={seed}")
    return random.Random(seed)


@asynccontextmanager
async def loaded(url: str, chance: random.Random, sessions: int = SESSIONS) -> AsyncIterator[Load]:
    """Run agents that send turns during the block, and finish their last turns after it."""
    load = Load(chance)
    limits = httpx.Limits(max_connections=sessions)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        talks = [load.talk(http, f"s{number}", stream=number % 2 == 0) for number in range(sessions)]
        running = asyncio.gather(*talks)
        try:
            yield load
        finally:
            load.stopped = True
            await running


async def killed_under_load(process: Process, chance: random.Random) -> dict[str, str]:
    """Kill the server with kill -9 after a random number of replies; return those that clients had received whole."""
    replies = chance.randint(1, 150)
    async with loaded(process.url, chance) as load:
        await load.until(lambda: len(load.seen) >= replies)
        await asyncio.to_thread(process.kill)
        await load.until(lambda: load.gone)
    return load.seen


@pytest.mark.parametrize("rounds", [3, pytest.param(10, marks=pytest.mark.engines)])
def test_kill_9_under_load_loses_no_reply_that_was_received_whole(
    tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    seen: dict[str, str] = {}
    for _ in range(rounds):  # every server starts on the database that the killed one left
        with server_process(tmp_path, *FLAGS) as process:
            seen |= asyncio.run(killed_under_load(process, chance))
        check_database(sqlite_url(tmp_path))
        check_columns(sqlite_url(tmp_path))
    stored = asyncio.run(stored_outputs(tmp_path))
    assert {key: stored.get(key) for key in seen} == seen
    with server_process(tmp_path, *FLAGS) as process:  # the server starts once more and exports the whole database
        body = {"filter": {"task_id": "s0"}, "layout": "individual"}
        exported = httpx.post(f"{process.url}/export_trajectories", json=body).json()
        assert {sample["interaction_id"] for sample in exported["samples"]} <= set(stored)


def check_columns(url: str) -> None:
    """Raise AssertionError unless each complete turn, and no other, has its two replay columns."""
    turns = execute(url, "SELECT id FROM interactions WHERE status = 'complete' AND output_tokens > 0 ORDER BY id")
    columns = execute(url, "SELECT interaction_id, name FROM side_columns ORDER BY interaction_id, name")
    assert columns == [(name, column) for (name,) in turns for column in ("top_logprobs", "top_token_ids")] != []


@pytest.mark.engines  # not for an engine: two servers that load a processor take seconds
def test_kill_9_loses_no_image_of_a_turn_that_was_answered(tmp_path: Path, vision_folder: Path) -> None:
    flags = (*FLAGS, "--tokenizer", str(vision_folder))
    with server_process(tmp_path, *flags) as process:
        shown = asyncio.run(shown_until_killed(process))
    check_database(sqlite_url(tmp_path))
    with server_process(tmp_path, *flags) as process, httpx.Client(base_url=process.url) as http:
        for session, image in shown:
            path = f"/rl/sessions/{session}/images/{hashlib.sha256(image).hexdigest()}"
            assert http.get(path).content == image
    assert len(shown) >= 20


async def shown_until_killed(process: Process) -> list[tuple[str, bytes]]:
    """Show images in four sessions until 20 turns are answered and the server is killed; return what was answered."""
    shown: list[tuple[str, bytes]] = []

    async def show(http: httpx.AsyncClient, session: str, first: int) -> None:
        for seed in range(first, first + 1000):
            body = {"model": "m", "messages": [user([image_url(png(seed=seed))])]}  # type: ignore[arg-type]
            try:
                (await http.post(f"/{session}/v1/chat/completions", json=body)).raise_for_status()
            except httpx.TransportError:
                return
            shown.append((session, png(seed=seed)))
            if len(shown) == 20:
                await asyncio.to_thread(process.kill)

    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        await asyncio.gather(*(show(http, f"s{n}", 1000 * n) for n in range(4)))
    return shown


def test_turns_get_503_while_postgres_is_down_and_continue_afterwards(tmp_path: Path, chance: random.Random) -> None:
    postgres = Postgres()
    url = postgres.create_database()
    try:
        with server_process(tmp_path, *FLAGS, "--migrate", "--database-wait-s", "0", database_url=url) as process:
            seen = asyncio.run(through_a_crash(process, postgres, chance))
            assert process.alive
        check_database(url)
        stored = asyncio.run(outputs_at(url))
        assert {key: stored.get(key) for key in seen} == seen
    finally:
        postgres.close()


async def through_a_crash(process: Process, postgres: Postgres, chance: random.Random) -> dict[str, str]:
    async with loaded(process.url, chance, sessions=8) as load, httpx.AsyncClient(base_url=process.url) as http:
        for _ in range(2):
            seen = len(load.seen)
            await load.until(lambda seen=seen: len(load.seen) > seen + 20)
            refused = len(load.refusals)
            await asyncio.to_thread(postgres.crash)
            await load.until(lambda refused=refused: len(load.refusals) > refused + 5)
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            await asyncio.to_thread(postgres.start)
            seen = len(load.seen)
            await load.until(lambda seen=seen: len(load.seen) > seen + 20)
    assert all(int(headers["retry-after"]) >= 1 for headers in load.refusals)
    assert not load.gone
    return load.seen


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_turns_get_503_while_the_disk_is_full_and_continue_afterwards(tmp_path: Path, chance: random.Random) -> None:
    with server_process(tmp_path, *FLAGS) as process:
        seen = asyncio.run(through_a_full_disk(process, tmp_path, chance))
    check_database(sqlite_url(tmp_path))
    stored = asyncio.run(stored_outputs(tmp_path))
    assert {key: stored.get(key) for key in seen} == seen


async def through_a_full_disk(process: Process, folder: Path, chance: random.Random) -> dict[str, str]:
    """Fill the disk for a while: no file of the server may grow beyond the current size of the write-ahead log."""
    hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
    async with loaded(process.url, chance, sessions=8) as load:
        await load.until(lambda: len(load.seen) > 20)
        size = (folder / "served.db-wal").stat().st_size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, hard))
        await load.until(lambda: len(load.refusals) > 5)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        seen = len(load.seen)
        await load.until(lambda: len(load.seen) > seen + 20)
    assert all(int(headers["retry-after"]) >= 1 for headers in load.refusals)
    assert not load.gone
    return load.seen


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_whatever_a_full_disk_refuses_is_done_once_when_it_is_sent_again(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS) as process, httpx.Client(base_url=process.url, timeout=60) as http:
        for name in ("s", "done", "old"):
            http.post("/rl/start_session", json={"session_id": name}).raise_for_status()
            http.post(f"/{name}/v1/chat/completions", json=TURN).raise_for_status()
        for name in ("done", "old"):
            http.post(f"/{name}/rl/end_session", json={"reward": 2.0}).raise_for_status()
        hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (0, hard))
        for method, path, body in WRITES:
            refused = http.request(method, path, json=body)
            assert refused.status_code == 503, (path, refused.text)
            wanted = "scratch_full" if path.endswith("export") else "store_unavailable"
            assert refused.json()["error"]["code"] == wanted
            assert int(refused.headers["retry-after"]) >= 1
            assert str(tmp_path) not in refused.text
        stream = http.post("/s/v1/chat/completions", json={**TURN, "stream": True, "seed": 1}).text
        assert "store_unavailable" in stream and "[DONE]" not in stream
        assert http.get("/ready").status_code == 503
        assert http.get("/rl/sessions/s").json()["status"] == "active"
        assert http.post("/trajectories/export", json={"session_id": "done"}).status_code == 200
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (hard, hard))
        assert http.get("/ready").status_code == 200
        for method, path, body in WRITES:
            done = http.request(method, path, json=body, headers={"x-stainless-retry-count": "1"})
            assert done.status_code == 200, (path, done.text)
        tree = http.get("/rl/sessions/s").json()
        complete = [turn for turn in tree["interactions"] if turn["status"] == "complete"]
        assert [turn["reward"] for turn in complete] == [3.0, 4.0]
        assert (tree["status"], tree["begun_not_ended"]) == ("ended", 0)
        assert http.get("/rl/sessions/done").status_code == 404
    assert "Traceback" not in process.output
    check_database(sqlite_url(tmp_path))


TURN = {"model": "m", "messages": [user("hi")], "max_tokens": 8}
# Every kind of request that writes to a disk, in an order in which each can be done after the one before it.
WRITES: list[tuple[str, str, Any]] = [
    ("POST", "/rl/start_session", {"session_id": "new"}),
    ("POST", "/s/v1/chat/completions", {**TURN, "seed": 7}),
    ("POST", "/named/v1/chat/completions", TURN),
    ("POST", "/s/rl/set_reward", {"reward": 3.0, "turn": 0}),
    ("POST", "/s/rl/mark", {"turn": 0, "trainable": False}),
    ("POST", "/s/rl/rotate_keys", {}),
    ("POST", "/s/rl/end_session", {"reward": 4.0}),
    ("POST", "/trajectories/export", {"session_id": "done", "format": "npz"}),
    ("POST", "/trajectories/export", {"session_id": "done", "format": "safetensors"}),
    ("POST", "/trajectories/claim", {"claim_id": "trainer", "limit": 1}),
    ("POST", "/trajectories/acknowledge", {"session_ids": ["old"]}),
    ("DELETE", "/rl/sessions/done", {}),
]


@pytest.mark.parametrize("garbage", [0, 5000])
def test_after_a_torn_write_ahead_log_the_server_starts_and_serves(
    tmp_path: Path, chance: random.Random, garbage: int
) -> None:
    with server_process(tmp_path, *FLAGS) as process:
        asyncio.run(killed_under_load(process, chance))
    log = tmp_path / "served.db-wal"
    whole = log.stat().st_size
    with log.open("r+b") as file:
        file.truncate(whole - chance.randrange(1, whole // 2))
        file.seek(0, os.SEEK_END)
        file.write(chance.randbytes(garbage))
    with server_process(tmp_path, *FLAGS) as process:
        text = asyncio.run(one_turn(process.url))
    check_database(sqlite_url(tmp_path))
    assert text in asyncio.run(stored_outputs(tmp_path)).values()


async def one_turn(url: str) -> str:
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        body = {"model": "m", "messages": [user("hi")], "stream": True}
        return (await streamed(http, "/after/v1/chat/completions", body))[1]


def test_a_second_server_on_the_same_file_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS) as process:
        second = run("serve", *FLAGS, "--port", "0", "--database-url", sqlite_url(tmp_path), cwd=ROOT)
        assert second.returncode == 1
        held = f"tokengrove: the database {tmp_path / 'served.db'} is in use by another server"
        assert second.stderr.endswith(f"\n{held}; stop that one first\n")
        assert asyncio.run(one_turn(process.url))
    check_database(sqlite_url(tmp_path))


def test_a_call_interrupted_by_a_crash_is_counted_as_begun_and_not_ended(tmp_path: Path) -> None:
    slow = ("--engine", "scripted", "--engine-arg", "tokens=9000", "--engine-arg", "chunk=1")
    with server_process(tmp_path, *slow, "--engine-arg", "delay_s=0.05") as process:
        asyncio.run(killed_with_a_call_on_the_disk(process, tmp_path))
    assert "1 unfinished calls, 0 findings" in check_database(sqlite_url(tmp_path))
    with server_process(tmp_path, *FLAGS) as process:
        asyncio.run(one_turn(process.url))
        exported = httpx.post(f"{process.url}/export_trajectories", json={"session_ids": ["s", "after"]}).json()
        shown = httpx.get(f"{process.url}/rl/sessions/s").json()
    told = entries(exported)
    assert (told["s"]["complete"], told["s"]["begun_not_ended"], shown["begun_not_ended"]) == (False, 1, 1)
    assert (told["after"]["complete"], told["after"]["begun_not_ended"]) == (True, 0)


@pytest.mark.parametrize("headers", [{}, {"x-stainless-retry-count": "1"}], ids=["unmarked", "marked"])
def test_a_session_is_complete_again_once_a_call_that_a_crash_cut_off_is_answered(
    tmp_path: Path, headers: dict[str, str]
) -> None:
    slow = ("--engine", "scripted", "--engine-arg", "tokens=9000", "--engine-arg", "chunk=1")
    with server_process(tmp_path, *slow, "--engine-arg", "delay_s=0.05") as process:
        asyncio.run(killed_with_a_call_on_the_disk(process, tmp_path))
    whole = ("export", "--session", "s", "--require-complete", "--output")
    with server_process(tmp_path, *FLAGS) as process, httpx.Client(base_url=process.url, timeout=60) as http:
        other = http.post("/s/v1/chat/completions", json={"model": "m", "messages": [user("other")]})
        assert other.status_code == 200
        assert http.get("/rl/sessions/s").json()["begun_not_ended"] == 1
        refused = run(*whole, "cut.jsonl", "--url", process.url, cwd=tmp_path)
        assert refused.returncode == 1 and "1 of 1 sessions are incomplete" in refused.stderr, refused.stderr
        answer = http.post("/s/v1/chat/completions", json={"model": "m", "messages": [user("hi")]}, headers=headers)
        assert answer.status_code == 200
        assert http.get("/rl/sessions/s").json()["begun_not_ended"] == 0
        assert http.get("/rl/sessions/s?include=running").json()["running"] == []
        exported = run(*whole, "whole.jsonl", "--url", process.url, cwd=tmp_path)
        assert exported.returncode == 0, exported.stderr
    assert "0 unfinished calls, 0 findings" in check_database(sqlite_url(tmp_path))


async def killed_with_a_call_on_the_disk(process: Process, folder: Path) -> None:
    """Send kill -9 in the middle of a generation, when the database has only the note that the call began."""
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        body = {"model": "m", "messages": [user("hi")]}
        turn = asyncio.ensure_future(http.post("/s/v1/chat/completions", json=body))
        log = folder / "served.db-wal"
        for _ in range(1500):
            if b"chatcmpl-" in log.read_bytes():
                break
            await asyncio.sleep(0.02)
        await asyncio.to_thread(process.kill)
        with pytest.raises(httpx.HTTPError):
            await turn


async def stored_outputs(folder: Path) -> dict[str, str]:
    return await outputs_at(sqlite_url(folder))


def test_sigterm_lets_running_turns_end_and_exits_0(tmp_path: Path) -> None:
    flags = (
        "--engine",
        "scripted",
        "--engine-arg",
        "tokens=20",
        "--engine-arg",
        "chunk=1",
        "--engine-arg",
        "delay_s=0.05",
    )
    with server_process(tmp_path, *flags) as process:
        text = asyncio.run(terminate_in_the_middle(process))
        assert process.wait() == 0
        assert "Traceback" not in process.output
    stored = asyncio.run(stored_outputs(tmp_path))
    assert list(stored.values()) == [text]


async def terminate_in_the_middle(process: Process) -> str:
    """Send SIGTERM during a streamed turn; return the text of that turn."""
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        turn = asyncio.ensure_future(streamed(http, "/s/v1/chat/completions", body))
        await terminate_with_a_turn_in_flight(process, http)
        return (await turn)[1]


async def terminate_with_a_turn_in_flight(process: Process, http: httpx.AsyncClient) -> None:
    for _ in range(500):
        if "tokengrove_in_flight 1.0" in (await http.get("/metrics")).text:
            break
        await asyncio.sleep(0.02)
    process.terminate()


async def cut_by_the_signal(process: Process) -> httpx.Response:
    body = {"model": "m", "messages": [user("hi")]}
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        turn = asyncio.ensure_future(http.post("/s/v1/chat/completions", json=body))
        await terminate_with_a_turn_in_flight(process, http)
        return await turn


def test_sigterm_waits_at_most_the_shutdown_timeout_and_records_interrupted_turns(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--engine-arg", "tokens=9000", "--engine-arg", "chunk=1")
    flags += ("--engine-arg", "delay_s=0.05", "--shutdown-timeout-s", "1")
    with server_process(tmp_path, *flags) as process:
        response = asyncio.run(cut_by_the_signal(process))  # without the interruption, the reply would take minutes
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert process.wait() == 0
        assert "Traceback" not in process.output
    assert asyncio.run(stored_statuses(tmp_path)) == [Status.ABORTED]


async def stored_statuses(folder: Path) -> list[Status]:
    store = await asyncio.to_thread(Store.open, sqlite_url(folder))
    try:
        return [interaction.status for interaction in await store.recordings.load_interactions("s")]
    finally:
        await store.close()
