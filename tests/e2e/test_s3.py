"""Archives on a server that speaks the protocol of S3: every command, exports, and a kill -9 around any request.

s3fs and moto are not among the packages of the test extra: `pip install -r tests/e2e/requirements-s3.txt`.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

s3fs = pytest.importorskip("s3fs", reason="needs tests/e2e/requirements-s3.txt")
server_of_moto = pytest.importorskip("moto.server", reason="needs tests/e2e/requirements-s3.txt")
import boto3  # noqa: E402
from werkzeug.serving import make_server  # noqa: E402

from proxy.store.archive import archive as module  # noqa: E402
from proxy.store.archive import files  # noqa: E402
from proxy.store.inspection import inspecting  # noqa: E402
from proxy.store.sql.codec import encode_json  # noqa: E402
from tests.archives import dumped, grow, there  # noqa: E402
from tests.databases import execute  # noqa: E402
from tests.e2e.processes import Command, run  # noqa: E402
from tests.support import says, serving  # noqa: E402

pytestmark = [pytest.mark.processes, pytest.mark.filterwarnings("ignore")]

BUCKET, FOLDER = "bucket", "s3://bucket/prefix"
PARTS = '{"default_block_size": 5242880}'
"""The configuration of fsspec with which an object of more than 5 MiB is uploaded in parts."""
ARCHIVED = {"s", "second", "empty"}


class Storage:
    """The storage. `stop_at` holds a request, until `go_on`, before or after it has been carried out."""

    def __init__(self) -> None:
        self._moto = server_of_moto.DomainDispatcherApplication(server_of_moto.create_backend_app)
        self._method, self._marks, self._after = "", "", False
        self.reached, self._released = threading.Event(), threading.Event()
        self.requests: list[tuple[str, str]] = []

    def stop_at(self, method: str, marks: str = "", *, after: bool) -> None:
        self.reached.clear()
        self._released.clear()
        self._method, self._marks, self._after = method, marks, after

    def go_on(self) -> None:
        self._method = ""
        self._released.set()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        method, query = environ["REQUEST_METHOD"], environ["QUERY_STRING"]
        self.requests.append((method, query))
        held = method == self._method and self._marks in query
        if held and not self._after:
            self._hold()
        # Read whole now: a client that is gone would end the connection in the middle of it.
        answer = list(self._moto(environ, start_response))
        if held and self._after:
            self._hold()
        return answer

    def _hold(self) -> None:
        self.reached.set()
        assert self._released.wait(60)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    """An empty bucket, which the variables of AWS name."""
    storage = Storage()
    server = make_server("127.0.0.1", 0, storage, threaded=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    told = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()  # they have read the variables
    client().create_bucket(Bucket=BUCKET)
    yield storage
    for found in objects():
        client().delete_object(Bucket=BUCKET, Key=found)
    client().delete_bucket(Bucket=BUCKET)
    server.shutdown()
    thread.join()


def client() -> Any:
    return boto3.client("s3")


def objects() -> list[str]:
    return [found["Key"] for found in client().list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def command(folder: Path, *arguments: str, fails: bool = False, **environment: str) -> str:
    url = f"sqlite:///{folder / 'test.db'}"
    ran = run(*arguments, "--database-url", url, cwd=folder, **environment)
    assert (ran.returncode != 0) == fails, ran.stdout + ran.stderr
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.stdout + ran.stderr


def archive(folder: Path, to: str = FOLDER, **options: Any) -> str:
    return command(folder, "archive", "--older-than", "0s", "--to", to, **options)


async def grown(folder: Path) -> str:
    url = f"sqlite:///{folder / 'test.db'}"
    await grow(folder, url)
    return url


def check_consistent(url: str) -> None:
    """Each session is in one place, and the bucket has exactly the files that the database names."""
    assert there(url) | there(url, "archived_sessions") == {*ARCHIVED, "unseen"}
    assert not there(url) & there(url, "archived_sessions")
    files = {file for (file,) in execute(url, "SELECT file FROM archive_files")}
    assert {f"s3://{BUCKET}/{name}" for name in objects()} == files
    with inspecting(url) as inspection:
        assert module.faults(inspection.read_now) == []


async def exported(folder: Path, url: str, delete: str | None = None) -> list[bytes]:
    """The exports of the sessions in two formats. `delete`: a session that the server deletes then."""
    async with serving(folder, says("x"), database_url=url) as server:
        found = []
        for name in ("jsonl", "npz"):
            body = {"session_ids": sorted(ARCHIVED), "format": name, "include": ["messages"] if name == "jsonl" else []}
            answer = await server.http.post("/trajectories/export", json=body)
            assert answer.is_success, answer.text
            found.append(answer.content)
        if delete is not None:
            assert (await server.http.delete(f"/rl/sessions/{delete}")).status_code == 200
    return found


async def test_sessions_are_archived_exported_deleted_restored_and_pruned(tmp_path: Path, storage: Storage) -> None:
    url = await grown(tmp_path)
    exports = await exported(tmp_path, url)
    before = dumped(url, tmp_path)
    assert "archived 3 sessions, 4 turns to s3://bucket/prefix" in archive(tmp_path)
    [file] = objects()
    assert f"s\t3\ts3://bucket/{file}" in command(tmp_path, "archive", "list")
    assert "3 archived sessions" in command(tmp_path, "db", "check")
    check_consistent(url)
    assert await exported(tmp_path, url) == exports
    command(tmp_path, "archive", "restore", "--all")
    assert (dumped(url, tmp_path), objects()) == (before, [])
    archive(tmp_path)
    await exported(tmp_path, url, delete="second")
    [new] = objects()
    assert new != file and there(url, "archived_sessions") == {"s", "empty"}
    execute(url, "UPDATE archived_sessions SET ended_at = 1e12 WHERE session_id = 's'")
    assert "deleted 1 archived sessions" in command(tmp_path, "db", "prune", "--older-than", "0s")
    command(tmp_path, "archive", "restore", "s")
    assert objects() == []
    assert there(url) == {"s", "unseen"}


async def killed(folder: Path, storage: Storage, url: str, *arguments: str) -> None:
    """Run a command, and kill it once the storage holds its request."""
    running = Command(*arguments, "--database-url", url, cwd=folder)
    reached = await asyncio.to_thread(storage.reached.wait, 60)
    assert reached, running.wait()
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    storage.go_on()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_kill_while_a_file_is_written_loses_and_doubles_nothing(
    tmp_path: Path, storage: Storage, after: bool
) -> None:
    url = await grown(tmp_path)
    before = dumped(url, tmp_path)
    storage.stop_at("PUT", after=after)
    await killed(tmp_path, storage, url, "archive", "--older-than", "0s", "--to", FOLDER)
    assert there(url) == {*ARCHIVED, "unseen"}
    assert "archived 3 sessions" in archive(tmp_path)
    check_consistent(url)
    storage.stop_at("DELETE", after=after)
    await killed(tmp_path, storage, url, "archive", "restore", "second")
    assert there(url) == {"second", "unseen"}
    command(tmp_path, "archive", "restore", "s")
    check_consistent(url)
    command(tmp_path, "archive", "restore", "--all")
    assert (dumped(url, tmp_path), objects()) == (before, [])


def uploads() -> list[Any]:
    return list(client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", []))


async def test_an_object_in_parts_is_whole_or_absent(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSSPEC_S3", PARTS)
    url = await grown(tmp_path)
    noise = encode_json({"noise": os.urandom(8 << 20).hex()})
    execute(url, f"UPDATE sessions SET metadata = x'{noise.hex()}' WHERE session_id = 's'")
    storage.stop_at("PUT", "partNumber", after=True)
    await killed(tmp_path, storage, url, "archive", "--older-than", "0s", "--to", FOLDER)
    assert (objects(), len(uploads())) == ([], 1), "S3 keeps the parts, which a rule of the bucket deletes"
    assert "archived 3 sessions" in archive(tmp_path)
    assert len(uploads()) == 1
    check_consistent(url)


def test_an_upload_that_fails_is_aborted(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", json.loads(PARTS))
    with pytest.raises(KeyError), files.writing(f"{FOLDER}/sessions.parquet") as file:
        file.write(bytes(12 << 20))
        assert len(uploads()) == 1
        raise KeyError
    del file
    gc.collect()
    assert (objects(), uploads()) == ([], [])


async def test_an_error_of_s3_is_told_and_a_wrong_bucket_does_no_harm(tmp_path: Path, storage: Storage) -> None:
    url = await grown(tmp_path)
    assert "The specified bucket does not exist" in archive(tmp_path, "s3://typo/prefix", fails=True)
    assert "archived 3 sessions" in archive(tmp_path)
    check_consistent(url)
    for arguments in (("archive", "restore", "s"), ("archive", "delete", "s"), ("db", "check")):
        told = command(tmp_path, *arguments, fails=True, AWS_ENDPOINT_URL="http://127.0.0.1:9")
        assert "s3://bucket/prefix" in told and "Could not connect to the endpoint URL" in told
    assert there(url, "archived_sessions") == ARCHIVED
