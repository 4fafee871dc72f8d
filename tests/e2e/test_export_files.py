"""`tokengrove export --url`: every page of an export as a file, a summary, and an exit code that tells of gaps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import httpx
import orjson
import pytest

from proxy.client import Client
from proxy.client.export_files import export_files
from proxy.errors import ConfigurationError, InvalidRequest, SessionNotFound, Unauthorized
from proxy.server import serving
from proxy.settings import Settings
from tests.databases import execute
from tests.e2e.processes import ROOT

KEY = "admin-key-of-the-test"


@pytest.fixture
def database(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'export.db'}"


@pytest.fixture
def url(database: str) -> Iterator[str]:
    """Five sessions: two turns each in group g, the first of them with two answers to its first question; one in h."""
    settings = Settings(
        port=0, engine="scripted", engine_arg=("tokens=8",), database_url=database, log_level="warning", admin_key=KEY
    )
    with serving(settings) as url:
        for number in range(4):
            play(url, f"s{number}", "g", reward=float(number), again=number == 0)
        play(url, "other", "h", reward=9.0)
        yield url


def play(url: str, name: str, group: str, *, reward: float, again: bool = False) -> None:
    with Client(url, KEY) as client, client.session(name, session_id=name, group_id=group) as session:
        messages = [{"role": "user", "content": "one"}]
        for _ in range(2 if again else 1):
            reply = httpx.post(session.base_url + "/chat/completions", json={"model": "m", "messages": messages})
        messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "two"}]
        httpx.post(session.base_url + "/chat/completions", json={"model": "m", "messages": messages}).raise_for_status()
        session.set_reward(reward)


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    command = [sys.executable, "-m", "cli", "export", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def shown(stderr: str) -> dict[str, str]:
    """The rows of the summary table."""
    rows = [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in stderr.splitlines() if "│" in line]
    return {row[0]: row[1] for row in rows}


def test_every_session_is_in_one_file_and_the_summary_counts_what_is_there(url: str, tmp_path: Path) -> None:
    flags = ("--url", url, "--admin-key", KEY, "--group", "g", "--page-size", "2", "-o", "out")
    done = run(*flags, "--layout", "concat", "--format", "jsonl", "--require-complete", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["page-00000.jsonl", "page-00001.jsonl"]
    pages = [[orjson.loads(line) for line in file.read_bytes().splitlines()] for file in files]
    assert [[sample["session_id"] for sample in page] for page in pages] == [["s0", "s0", "s1"], ["s2", "s3"]]
    samples = [sample for page in pages for sample in page]
    with Client(url, KEY) as client:
        expected = client.export(group_id="g", layout="concat").samples
    assert [sample["input_ids"] for sample in samples] == [sample.input_ids.tolist() for sample in expected]
    summary = shown(done.stderr)
    assert summary == {
        "sessions": "4",
        "samples": "5",
        "tokens": str(sum(len(sample.input_ids) for sample in expected)),
        "trained tokens": str(9 * 8),
        "mean return": f"{sum(float(sample.rewards[0]) for sample in expected) / 5:.4f}",
        "forks": "1 samples beyond one a session, 0 turns unaligned",
        "complete": "all",
    }


def test_a_page_in_json_is_the_servers_answer_as_it_is(url: str, tmp_path: Path) -> None:
    tally = export_files(url, KEY, tmp_path / "out", {"session_ids": ["s1"], "layout": "individual"}, "json")
    [file] = (tmp_path / "out").iterdir()
    answer = httpx.post(
        url + "/export_trajectories",
        json={"session_ids": ["s1"], "layout": "individual", "format": "json"},
        headers={"authorization": f"Bearer {KEY}"},
    )
    assert file.read_bytes() == answer.content
    assert (tally.sessions, tally.samples, tally.files, tally.incomplete) == (1, 2, 1, 0)


def test_a_session_that_lacks_a_call_is_counted_and_with_require_complete_the_exit_code_is_1(
    url: str, database: str, tmp_path: Path
) -> None:
    execute(database, "UPDATE interactions SET status = 'failed' WHERE session_id = 's2' AND seq = 1")
    flags = ("--url", url, "--admin-key", KEY)
    lenient = run(*flags, "-o", "lenient", cwd=tmp_path)
    assert (lenient.returncode, shown(lenient.stderr)["complete"]) == (0, "4, 1 lack a call")
    strict = run(*flags, "-o", "strict", "--require-complete", cwd=tmp_path)
    assert strict.returncode == 1
    assert strict.stderr.splitlines()[-1].startswith("tokengrove: 1 of 5 sessions are incomplete")


class Binary(BaseHTTPRequestHandler):
    """A server whose format nobody here reads: two pages of bytes, the cursor between them not ASCII."""

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        first = "cursor" not in body
        assert first or body["cursor"] == "grün/1"
        content = b"\x00first\xff" if first else b"second"
        self.send_response(200)
        about = {"sessions": 3 if first else 1, "incomplete": 1, **({"cursor": quote("grün/1")} if first else {})}
        for name, value in about.items():
            self.send_header(f"x-tokengrove-{name}", str(value))
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def test_a_format_of_the_servers_own_is_written_as_it_comes_and_headers_say_what_it_holds(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Binary) as server:
        threading.Thread(target=server.serve_forever).start()
        tally = export_files(f"http://127.0.0.1:{server.server_port}", None, tmp_path / "out", {}, "parquet")
        server.shutdown()
    contents = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert contents == {"page-00000.parquet": b"\x00first\xff", "page-00001.parquet": b"second"}
    assert (tally.sessions, tally.incomplete, tally.samples, tally.size) == (4, 2, None, 13)


def test_what_the_server_refuses_is_its_own_error_and_leaves_no_file(url: str, tmp_path: Path) -> None:
    for key, request, kind in (
        (None, {}, Unauthorized),
        (KEY, {"layout": "round"}, InvalidRequest),
        (KEY, {"session_ids": ["nobody"]}, SessionNotFound),
    ):
        with pytest.raises(kind):
            export_files(url, key, tmp_path / "out", request, "json")
    with pytest.raises(InvalidRequest, match="format"):
        export_files(url, KEY, tmp_path / "out", {}, "clay-tablets")
    assert not list((tmp_path / "out").iterdir())


def test_two_exports_never_mix_in_one_folder(url: str, tmp_path: Path) -> None:
    export_files(url, KEY, tmp_path / "out", {}, "jsonl")
    with pytest.raises(ConfigurationError, match="holds an export already"):
        export_files(url, KEY, tmp_path / "out", {}, "jsonl")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), ("--url", "--all")),
        (("--all", "--url", "http://127.0.0.1:9"), ("--url", "--all")),
        (("--url", "http://127.0.0.1:9"), ("-o FOLDER",)),
        (("--url", "http://127.0.0.1:9", "-o", "out"), ("http://127.0.0.1:9", "no answer")),
        (("--url", "http://127.0.0.1:9", "-o", "file/below"), ("file/below",)),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    done = run(*flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr.strip().splitlines()[-1] for word in words), done.stderr
