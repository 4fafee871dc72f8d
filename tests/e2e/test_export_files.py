"""`tokengrove export --url`: a file for every page, a summary, and an exit code that reports incomplete sessions."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import httpx
import orjson
import pytest

from tests.databases import execute
from tests.e2e.processes import ROOT, run
from tests.exports import entries
from tests.support import default_url, real_server
from tokengrove import client
from tokengrove.client import Client, read
from tokengrove.client.export_files import export_files
from tokengrove.errors import ConfigurationError, InvalidRequest, SessionNotFound, Unauthorized

KEY = "admin-key-of-the-test"
FORMATS = ("json", "jsonl", "areal", "npz", "safetensors", "arrow", "parquet")


@pytest.fixture
def database(tmp_path: Path) -> str:
    return default_url(tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """A server with five sessions of two turns each.

    Four are in group g, the first of them with two answers to its first question; one is in group h.
    """
    with real_server(tmp_path, engine_arg=("tokens=8",), admin_key=KEY) as url:
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


def export(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("export", *arguments, cwd=cwd, COLUMNS="200")


def export_onto_a_small_disk(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run an export whose files may not grow beyond 256 KiB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    limited = ["bash", "-c", 'ulimit -f 256; exec "$@"', "bash", sys.executable, "-m", "tokengrove", "export"]
    return subprocess.run([*limited, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def shown(stderr: str) -> dict[str, str]:
    """Return the rows of the summary table."""
    rows = [[cell.strip() for cell in re.split("[│|]", line)[1:-1]] for line in stderr.splitlines() if "│" in line]
    return {row[0]: row[1] for row in rows}


def test_every_session_is_in_one_file_and_the_summary_counts_the_samples(url: str, tmp_path: Path) -> None:
    flags = ("--url", url, "--admin-key", KEY, "--group", "g", "--limit", "2", "-o", "out")
    done = export(*flags, "--layout", "concat", "--format", "jsonl", "--require-complete", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "out").iterdir())
    assert [file.name for file in files] == ["page-00000.jsonl", "page-00001.jsonl"]
    pages = [[orjson.loads(line) for line in file.read_bytes().splitlines()] for file in files]
    assert [[sample["session_id"] for sample in page] for page in pages] == [["s0", "s0", "s1"], ["s2", "s3"]]
    samples = [sample for page in pages for sample in page]
    with Client(url, KEY) as client:
        expected = client.export(filter={"group_id": "g"}, layout="concat").samples
    assert [sample["input_ids"] for sample in samples] == [sample.input_ids.tolist() for sample in expected]
    summary = shown(done.stderr)
    assert summary == {
        "sessions": "4",
        "samples": "5",
        "tokens": str(sum(len(sample.input_ids) for sample in expected)),
        "trained tokens": str(9 * 8),
        "mean reward": "1.5000",
        "forks": "1 samples beyond one a session, 0 turns unaligned",
        "complete": "all",
    }


@pytest.mark.parametrize("name", ["samples.npz", "below/samples.parquet", "samples.jsonl"])
def test_a_file_name_makes_one_file_of_that_name_and_its_format(url: str, tmp_path: Path, name: str) -> None:
    done = export("--url", url, "--admin-key", KEY, "-o", name, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    file = tmp_path / name
    assert file.is_file()
    assert file.stat().st_mode & 0o777 == 0o600  # what agents were told
    assert [each.name for each in file.parent.iterdir() if "test.db" not in each.name] == [file.name]
    with Client(url, KEY) as client:
        expected = client.export(layout="concat").samples
    found = read(file, file.suffix[1:]).samples
    assert [sample.input_ids.tolist() for sample in found] == [sample.input_ids.tolist() for sample in expected]
    assert name in done.stderr and shown(done.stderr)["sessions"] == "5"


def test_a_jsonl_file_holds_all_pages_and_another_format_one(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.export_files, "_MOST_SESSIONS", 2)
    export_files(url, KEY, tmp_path / "all.jsonl", {}, "jsonl")
    assert len({sample.session_id for sample in read(tmp_path / "all.jsonl", "jsonl").samples}) == 5
    with pytest.raises(ConfigurationError, match="holds at most 2 sessions; give a folder"):
        export_files(url, KEY, tmp_path / "all.npz", {}, "npz")
    assert sorted(file.suffix for file in tmp_path.iterdir() if file.name.startswith((".", "all"))) == [".jsonl"]


@pytest.mark.parametrize(
    ("output", "flags", "words"),
    [
        ("samples.npz", ("--format", "jsonl"), "samples.npz names format npz, and --format says jsonl"),
        ("samples.npz", ("--page-size", "2"), "--page-size"),
        ("there.npz", (), "there.npz exists already"),
    ],
)
def test_a_file_name_that_cannot_be_written_is_refused(
    tmp_path: Path, output: str, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "there.npz").write_text("kept")
    done = export("--url", "http://127.0.0.1:9", "-o", output, *flags, cwd=tmp_path)
    assert done.returncode == 1 and words in done.stderr, done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["there.npz"]


def test_an_export_that_matches_nothing_says_so_and_fails_with_require_complete(url: str, tmp_path: Path) -> None:
    with Client(url, KEY) as admin, admin.session("eval", group_id="eval", metadata={"validate": True}):
        pass
    flags = ("--url", url, "--admin-key", KEY)
    for group, words in (("nobody", "no session matches"), ("eval", "no session matches, but 1 for validation")):
        done = export(*flags, "--group", group, "-o", f"{group}-1", cwd=tmp_path)
        assert (done.returncode, words in done.stderr) == (0, True), done.stderr
        done = export(*flags, "--group", group, "-o", f"{group}-2", "--require-complete", cwd=tmp_path)
        assert done.returncode == 1 and words in done.stderr.strip().splitlines()[-1], done.stderr
    done = export(*flags, "-o", "all", cwd=tmp_path)
    assert shown(done.stderr)["validation"] == "1 sessions left out; --validation include exports them"
    with Client(url, KEY) as admin, admin.session("retried", group_id="retried") as session:
        session.withdraw()
    done = export(*flags, "-o", "without", cwd=tmp_path)
    assert shown(done.stderr)["validation"] == "1 sessions left out; --validation include exports them"
    assert shown(done.stderr)["withdrawn"] == "1 sessions left out; --session exports them"
    done = export(*flags, "--metadata", "validate=true", "-o", "only", cwd=tmp_path)
    assert shown(done.stderr)["sessions"] == "1" and "validation" not in shown(done.stderr)


def test_a_json_page_is_the_unchanged_answer_of_the_server(url: str, tmp_path: Path) -> None:
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
    lenient = export(*flags, "-o", "lenient", cwd=tmp_path)
    assert (lenient.returncode, shown(lenient.stderr)["complete"]) == (0, "4; 1 lack a call")
    strict = export(*flags, "-o", "strict", "--require-complete", cwd=tmp_path)
    assert strict.returncode == 1
    assert strict.stderr.splitlines()[-1].startswith("tokengrove: 1 of 5 sessions are incomplete")


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("individual", {}),
        ("concat", {"train": {"turns": "last"}}),
        ("tree", {}),
        ("padded", {"prompt_length": 8, "response_length": 40, "on_too_long": "truncate"}),
    ],
)
def test_the_summary_describes_the_files_in_every_layout_and_format(
    url: str, tmp_path: Path, layout: str, more: dict[str, Any]
) -> None:
    request = {"filter": {"group_id": "g"}, "layout": layout, "limit": 2, "reward_scope": "session", **more}
    answer = httpx.post(
        url + "/export_trajectories", json={**request, "limit": 4}, headers={"authorization": f"Bearer {KEY}"}
    ).json()
    samples = answer["samples"]
    for name in FORMATS:
        if name == "areal" and layout in ("tree", "padded"):
            continue
        tally = export_files(url, KEY, tmp_path / name, request, name)
        assert (tally.sessions, tally.samples, tally.files, tally.uncounted) == (4, len(samples), 2, None)
        assert tally.tokens == sum(sum(sample["attention_mask"]) for sample in samples)
        assert tally.trained == sum(sum(sample["loss_mask"]) for sample in samples)
        assert tally.scores == [entry["score"] for entry in entries(answer).values()]
        assert tally.cut == sum(sample.get("truncated_tokens", 0) for sample in samples)
        assert (tally.forks, tally.dropped, tally.unaligned, tally.masked) == (1, 0, 0, 0)
        whole = read(tmp_path / name, name)
        assert [sample.interaction_id for sample in whole.samples] == [sample["interaction_id"] for sample in samples]
        assert whole.sessions == ({} if name == "jsonl" else entries(answer))


def test_the_summary_counts_samples_dropped_for_their_length(url: str, tmp_path: Path) -> None:
    flags = ("--url", url, "--admin-key", KEY, "--group", "g", "--format", "parquet", "-o", "out", "--layout", "padded")
    lengths = ("--prompt-length", "64", "--response-length", "8", "--on-too-long", "drop")
    done = export(*flags, *lengths, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = shown(done.stderr)
    assert (summary["sessions"], summary["samples"], summary["trained tokens"]) == ("4", "1", "8")
    assert summary["too long"] == "4 samples dropped, 0 tokens cut"
    assert summary["not trained"] == "64 sampled tokens: 64 too_long"
    assert summary["warnings"].startswith(
        "4, the first: session s0: 16 of 24 sampled tokens are not trained: 16 too_long"
    )


def test_an_export_that_trains_nothing_fails_with_require_complete_and_says_why(url: str, tmp_path: Path) -> None:
    flags = ("--url", url, "--admin-key", KEY, "--group", "g", "--train-turns", "7", "--require-complete")
    done = export(*flags, "-o", "out", cwd=tmp_path)
    assert done.returncode == 1
    assert shown(done.stderr)["not trained"] == "72 sampled tokens: 72 train"
    last = "tokengrove: the export trains nothing: of 4 sessions no token is trained (72 train)"
    assert done.stderr.splitlines()[-1] == last
    assert export(*flags[:-1], "-o", "more", cwd=tmp_path).returncode == 0


class Pages(BaseHTTPRequestHandler):
    """A server of two pages with a non-ASCII cursor between them, or of one page and then a broken connection."""

    contents: ClassVar[tuple[bytes, bytes]] = (b"\x00first\xff", b"second")
    breaks: ClassVar[bool] = False

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        first = "cursor" not in body
        assert first or body["cursor"] == "grün/1"
        content = self.contents[0 if first else 1]
        self.send_response(200)
        about = {"sessions": 3 if first else 1, "incomplete": 1, **({"cursor": quote("grün/1")} if first else {})}
        for name, value in about.items():
            self.send_header(f"x-tokengrove-{name}", str(value))
        self.send_header("content-length", str(len(content) + (self.breaks and not first)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def pages(contents: tuple[bytes, bytes], *, breaks: bool = False) -> Iterator[str]:
    kind = type("Pages", (Pages,), {"contents": contents, "breaks": breaks})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def test_an_unknown_format_of_the_server_is_written_unchanged_and_counted_by_its_headers(tmp_path: Path) -> None:
    with pages((b"\x00first\xff", b"second")) as address:
        tally = export_files(address, None, tmp_path / "out", {}, "clay-tablets")
    contents = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert contents == {"page-00000.clay-tablets": b"\x00first\xff", "page-00001.clay-tablets": b"second"}
    assert (tally.sessions, tally.incomplete, tally.samples, tally.size) == (4, 2, 0, 13)
    assert dict(tally.rows("concat")) == {
        "sessions": "4",
        "samples": "not counted: this client does not know format clay-tablets",
        "complete": "2; 2 lack a call",
    }


@pytest.mark.parametrize("name", ["npz", "jsonl"])
def test_an_interrupted_export_keeps_its_whole_pages_and_counts_them(url: str, tmp_path: Path, name: str) -> None:
    body = {"session_ids": ["s0", "s1", "s2"], "layout": "concat", "format": name}
    answer = httpx.post(url + "/export_trajectories", json=body, headers={"authorization": f"Bearer {KEY}"})
    with pages((answer.content, b"never whole"), breaks=True) as address:
        done = export("--url", address, "-o", "out", "--format", name, cwd=tmp_path)
    assert done.returncode == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == [f"page-00000.{name}"]
    assert "interrupted: only 1 file," in done.stderr
    summary = shown(done.stderr)
    assert (summary["sessions"], summary["samples"], summary["complete"]) == ("3", "4", "2; 1 lack a call")
    assert done.stderr.splitlines()[-1].startswith(f"tokengrove: no answer from {address}")


def test_a_full_disk_interrupts_an_export_like_any_other_failure(url: str, tmp_path: Path) -> None:
    answer = httpx.post(url + "/export_trajectories", json={}, headers={"authorization": f"Bearer {KEY}"})
    with pages((answer.content, bytes(1 << 20))) as address:
        flags = ("--url", address, "-o", "out", "--format", "json", "--layout", "individual")
        done = export_onto_a_small_disk(*flags, cwd=tmp_path)
    assert done.returncode == 1
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["page-00000.json"]
    assert "interrupted: only 1 file," in done.stderr
    assert done.stderr.splitlines()[-1] == "tokengrove: -o out: File too large"


@pytest.mark.parametrize(
    ("name", "content"), [("parquet", b"PAR1 or so"), ("jsonl", b'{"input_ids": [1]}\n'), ("npz", b"")]
)
def test_an_unreadable_page_is_not_written(tmp_path: Path, name: str, content: bytes) -> None:
    with pages((content, b"second")) as address, pytest.raises(InvalidRequest, match="page-00000"):
        export_files(address, None, tmp_path / "out", {}, name)
    assert not list((tmp_path / "out").iterdir())


def test_a_page_of_whole_lines_without_the_last_one_is_not_written(url: str, tmp_path: Path) -> None:
    body = {"session_ids": ["s0"], "layout": "concat", "format": "jsonl"}
    answer = httpx.post(url + "/export_trajectories", json=body, headers={"authorization": f"Bearer {KEY}"})
    samples = answer.content.splitlines(keepends=True)[:-1]
    with pages((b"".join(samples), b"second")) as address, pytest.raises(InvalidRequest, match="last line"):
        export_files(address, None, tmp_path / "out", {"layout": "concat"}, "jsonl")
    assert samples and not list((tmp_path / "out").iterdir())


def test_without_pyarrow_parquet_is_written_and_the_summary_names_the_missing_package(url: str, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from tokengrove.client.export_files import export_files\n"
        f"export_files({url!r}, {KEY!r}, 'out', {{'layout': 'concat'}}, 'parquet')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert shown(done.stderr) == {
        "sessions": "5",
        "samples": "not counted: this needs pyarrow: pip install pyarrow",
        "complete": "all",
    }
    assert len(read(tmp_path / "out", "parquet").samples) == 6


def test_a_refusal_of_the_server_raises_its_error_and_leaves_no_file(url: str, tmp_path: Path) -> None:
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
    with pytest.raises(ConfigurationError, match="already holds an export"):
        export_files(url, KEY, tmp_path / "out", {}, "jsonl")


def test_a_file_in_place_of_the_folder_is_refused_and_stays(url: str, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("kept")
    with pytest.raises(ConfigurationError, match="out is a file; give a folder"):
        export_files(url, KEY, tmp_path / "out", {}, "jsonl")
    assert (tmp_path / "out").read_text() == "kept"


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
def test_an_invalid_option_is_one_line_of_error(tmp_path: Path, flags: tuple[str, ...], words: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    done = export(*flags, cwd=tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr.strip().splitlines()[-1] for word in words), done.stderr
