"""`tokengrove demo`: its model calls a tool by itself, every token is trained, and its page stays while one looks."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from proxy.app import write_tiny_model
from proxy.serving.server import serving
from proxy.settings import Settings
from tests.e2e.processes import ROOT, interruptible, run
from tokengrove.demos.agents import chat_agent, lessons, tool_agent
from tokengrove.demos.lesson import teach


def test_the_demo_calls_a_tool_and_trains_every_sampled_token_without_a_warning(tmp_path: Path) -> None:
    done = run("demo", cwd=tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert re.search(r"All \d+ tokens that the model sampled are trained", done.stdout)
    assert done.stdout.count('add({"a": ') == 4
    for words in ("continued, aligned", "branched from 0, aligned", "tool_calls", "tokengrove serve"):
        assert words in done.stdout
    assert "grammar" not in done.stdout and "Ctrl-C" not in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_at_a_terminal_the_page_stays_with_what_the_links_name_until_it_is_interrupted(tmp_path: Path) -> None:
    terminal, its_end = pty.openpty()
    command = [sys.executable, "-m", "tokengrove", "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    with interruptible():
        process = subprocess.Popen(
            command, cwd=tmp_path, env=environment, stdin=its_end, stdout=its_end, stderr=its_end
        )
    os.close(its_end)
    try:
        shown = until(terminal, "Ctrl-C")
        links = re.findall(r"(http://\S+/ui)#/(\S+)", shown)
        assert [view.split("?")[0] for _, view in links] == [
            "sessions",
            "session/chat-0",
            "session/sum-0",
            "session/sum-0",
        ]
        page = links[0][0]
        assert httpx.get(page).text.startswith("<!doctype html>")
        for session, query, reason in (("chat-0", "", "branched"), ("sum-0", "&show=tokens", "continued")):
            tree = httpx.get(f"{page.removesuffix('/ui')}/rl/sessions/{session}").json()
            (turn,) = [node["id"] for node in tree["interactions"] if node["reason"] == reason and node["reward"]]
            assert f"session/{session}?turn={turn}{query}" in [view for _, view in links]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def until(terminal: int, words: str) -> str:
    """What is shown at the terminal up to the line with these words, without colours."""
    shown = b""
    while words.encode() not in shown:
        shown += os.read(terminal, 65536)
    return re.sub(r"\x1b\[[\d;]*m", "", shown.decode())


@pytest.fixture
def taught(tmp_path: Path) -> Iterator[OpenAI]:
    """A client of a server whose model had the lessons of the demo."""
    write_tiny_model(tmp_path / "model", 0)
    teach(tmp_path / "model", list(lessons()))
    settings = Settings(
        port=0,
        model=str(tmp_path / "model"),
        engine="transformers",
        engine_arg=("device=cpu",),
        database_url=f"sqlite:///{tmp_path / 't.db'}",
        log_level="warning",
    )
    with serving(settings) as url, OpenAI(base_url=f"{url}/taught/v1", api_key="any") as openai:
        yield openai


def test_a_taught_model_samples_each_of_its_answers_and_never_fails_to_call_the_tool(taught: OpenAI) -> None:
    said: list[tuple[str, str]] = []
    sums = [tool_agent(taught, seed, lambda *line: said.append(line)) for seed in range(16)]
    assert {call for who, call in said if who == "call"} == {'add({"a": 17, "b": 25})', 'add({"a": 17, "b": 52})'}
    assert {answer for who, answer in said if who == "model"} == {"It is 42.", "It is 69."}
    assert {reward for rewards in sums for reward in rewards.values()} == {0.0, 1.0}
    said.clear()
    for seed in range(16):
        chat_agent(taught, seed, lambda *line: said.append(line))
    assert {"Oak.", "Elm.", "Pine.", "30 m."} <= {answer for who, answer in said if who == "model"}
