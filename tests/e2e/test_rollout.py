"""`tokengrove rollout` and `eval` as processes: killed, interrupted, resumed, and what they print and return."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.processes import ROOT, interruptible, run
from tests.support import real_server
from tokengrove.client import Client
from tokengrove.client.options import ListingFilter

AGENT = """
import time
from pathlib import Path

import httpx


def once(task, base_url, sample):
    print("what an agent prints")
    body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": task["question"]}]}
    httpx.post(f"{base_url}/chat/completions", json=body, timeout=60).raise_for_status()
    return float(sample % 2)


def fails(task, base_url, sample):
    once(task, base_url, sample)
    raise RuntimeError("no luck")


def waits(task, base_url, sample):
    \"\"\"All samples but the first of each task wait until there is a file.\"\"\"
    reward = once(task, base_url, sample)
    while sample and not Path("go").exists():
        time.sleep(0.02)
    return reward
"""
ROWS = [{"question": "one"}, {"question": "two"}, {"question": "three"}]


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with real_server(tmp_path, engine_arg=("tokens=4",)) as url:
        yield url


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(AGENT)
    (tmp_path / "tasks.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))


def played(*arguments: str, cwd: Path) -> tuple[int, dict[str, Any], str]:
    """The exit code, the summary and what was told on stderr."""
    ended = run(*arguments, "--data", "tasks.jsonl", "--json", cwd=cwd, COLUMNS="200")
    return ended.returncode, json.loads(ended.stdout) if ended.stdout else {}, ended.stderr


@contextmanager
def playing(*arguments: str, cwd: Path) -> Iterator[subprocess.Popen[str]]:
    """A run in a new interpreter, killed at the end of the block at the latest."""
    command = [sys.executable, "-m", "tokengrove", *arguments, "--data", "tasks.jsonl"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with interruptible():
        process = subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def until_lines(path: Path, count: int, process: subprocess.Popen[str]) -> list[str]:
    """Wait until the journal has so many whole lines; nothing more comes then, as all others wait for the file."""
    while process.poll() is None:
        text = path.read_text() if path.exists() else ""
        if text.count("\n") >= count:
            return text.splitlines()
    raise AssertionError(f"the run ended: {process.communicate()}")


def journal_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def groups(url: str, status: str | None = None) -> Counter[str]:
    """How many sessions of each group count."""
    wanted: ListingFilter = {"withdrawn": False}
    if status is not None:
        wanted["status"] = status
    with Client(url) as client:
        listed = client.sessions(wanted)
    return Counter(session["group_id"] for session in listed)


WAITING = ("rollout", "player:waits", "--group-size", "2", "--name", "n")


def test_a_killed_run_loses_no_episode_and_plays_none_twice(url: str, tmp_path: Path) -> None:
    flags = (*WAITING, "--url", url)
    folder = tmp_path / "runs" / "n"
    with playing(*flags, cwd=tmp_path) as process:
        before = until_lines(folder / "journal.jsonl", len(ROWS), process)
        process.kill()
        process.wait()
    with (folder / "journal.jsonl").open("a") as journal:
        journal.write('{"pass": 0, "again": fal')  # a line that the kill tore
    (tmp_path / "go").touch()
    code, summary, told = played(*flags, cwd=tmp_path)
    assert (code, summary["done"], summary["earlier"]) == (0, 6, 3), told
    after = (folder / "journal.jsonl").read_text().splitlines()
    assert after[:3] == before and len(after) == 6
    assert list(groups(url).values()) == [2, 2, 2]  # the sessions that the kill left are withdrawn
    exported = {json.loads(line)["session_id"] for line in (folder / "samples.jsonl").read_text().splitlines()}
    assert exported == {line["session_id"] for line in journal_of(folder)}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_ends_cleanly_and_goes_on_later(url: str, tmp_path: Path, number: signal.Signals) -> None:
    flags = (*WAITING, "--url", url)
    folder = tmp_path / "runs" / "n"
    with playing(*flags, "--json", cwd=tmp_path) as process:
        until_lines(folder / "journal.jsonl", len(ROWS), process)
        process.send_signal(number)
        stdout, stderr = process.communicate()
    assert process.returncode == 130, stderr
    summary = json.loads(stdout)
    assert (summary["done"], summary["not_played"], summary["complete"]) == (3, 3, False)
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert "the same command plays the rest" in stderr
    assert groups(url, "active") == {} and list(groups(url).values()) == [1, 1, 1]
    (tmp_path / "go").touch()
    code, summary, _ = played(*flags, cwd=tmp_path)
    assert (code, summary["done"], summary["earlier"]) == (0, 6, 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_can_be_interrupted_while_its_own_server_starts(tmp_path: Path, number: signal.Signals) -> None:
    with playing("rollout", "player:once", "--server", "engine=scripted", "--name", "n", cwd=tmp_path) as process:
        until_exists(tmp_path / "runs" / "n" / "server.log", process)
        process.send_signal(number)
        _, stderr = process.communicate()
    assert process.returncode == 130 and "Traceback" not in stderr


def test_a_second_interruption_ends_the_run_at_once(url: str, tmp_path: Path) -> None:
    (tmp_path / "player.py").write_text(
        f"{AGENT}\n\nasync def clings(task, base_url, sample):\n    import asyncio\n    Path('begun').touch()\n"
        "    while True:\n        try:\n            await asyncio.sleep(60)\n"
        "        except asyncio.CancelledError:\n            Path('cancelled').touch()\n"
    )
    with playing("rollout", "player:clings", "--url", url, cwd=tmp_path) as process:
        until_exists(tmp_path / "begun", process)
        process.send_signal(signal.SIGINT)
        until_exists(tmp_path / "cancelled", process)
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130


def until_exists(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()


def test_without_a_url_the_run_has_a_server_of_its_own_whose_sessions_stay(tmp_path: Path) -> None:
    code, summary, told = played(
        *("rollout", "player:once", "--group-size", "2", "--server", "engine=scripted"), cwd=tmp_path
    )
    assert (code, summary["done"], summary["mean_reward"]) == (0, 6, 0.5), told
    assert summary["pass_at_k"] == {"1": 0.5, "2": 1.0}
    folder = tmp_path / "runs" / summary["name"]
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 6
    with closing(sqlite3.connect(folder / "tokengrove.db")) as database:
        assert database.execute("select count(*) from sessions where outcome = 'Finished'").fetchone() == (6,)


def test_eval_writes_no_samples_and_its_sessions_are_for_validation(url: str, tmp_path: Path) -> None:
    code, summary, told = played("eval", "player:once", "--group-size", "2", "--url", url, cwd=tmp_path)
    assert (code, summary["done"], summary["output"]) == (0, 6, None), told
    with Client(url) as client:
        assert client.claim(limit=9, group_size=1).sessions == {}
        assert client.export(filter={"status": "ended"}).samples == []
        assert len(client.sessions({"validation": "only"})) == 6


@pytest.mark.parametrize(("allowed", "code"), [("2", 1), ("3", 0)])
def test_the_exit_code_says_whether_more_episodes_failed_than_may(
    url: str, tmp_path: Path, allowed: str, code: int
) -> None:
    flags = ("eval", "player:fails", "--url", url, "--max-failures", allowed)
    found, summary, told = played(*flags, cwd=tmp_path)
    assert (found, summary["failures"]) == (code, {"agent": 3})
    assert summary["failure_examples"]["agent"].endswith("sample 0: RuntimeError: no luck")
    assert "journal.jsonl" in told


def test_a_run_whose_episodes_all_fail_tells_why_and_writes_no_samples(url: str, tmp_path: Path) -> None:
    flags = ("rollout", "player:fails", "--url", url, "--max-failures", "9", "--data", "tasks.jsonl")
    ended = run(*flags, cwd=tmp_path, COLUMNS="200")
    assert ended.returncode == 1
    assert re.search(r"failed +3: agent 3\n +agent, as task \d-\w+, sample 0: RuntimeError: no luck\n", ended.stdout)
    assert "there are no samples, because no episode was played to its end" in ended.stderr


def test_flags_of_the_export_shape_the_samples(url: str, tmp_path: Path) -> None:
    flags = ("rollout", "player:once", "--group-size", "2", "--url", url, "--output", "out.jsonl")
    more = ("--layout", "individual", "--advantages", "grpo", "--train-turns", "last")
    code, summary, told = played(*flags, *more, cwd=tmp_path)
    assert (code, summary["output"]) == (0, "out.jsonl"), told
    samples = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(samples) == 6 and all("advantages" in sample for sample in samples)


def test_a_command_behind_two_dashes_plays(url: str, tmp_path: Path) -> None:
    script = (
        "import os, json, urllib.request as u\n"
        "messages = [{'role': 'user', 'content': 'hi'}]\n"
        "body = json.dumps({'model': 'm', 'max_tokens': 4, 'messages': messages}).encode()\n"
        "url = os.environ['OPENAI_BASE_URL'] + '/chat/completions'\n"
        "r = u.Request(url, body, {'content-type': 'application/json'})\n"
        "u.urlopen(r).read()\n"
    )
    ended = run(
        *("eval", "--data", "tasks.jsonl", "--url", url, "--json", "--", sys.executable, "-c", script, "--url", "x"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["done"] == 3
