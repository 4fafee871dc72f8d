"""Agents on other machines: in a network of their own, they reach the listener for agents and nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.e2e.processes import Process, run, server_process
from tests.e2e.test_workers import workers_of
from tests.relays import __file__ as relay_file
from tests.support import user

ADMIN_KEY = "the-key-of-the-administrator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
KEY = ("--admin-key", ADMIN_KEY)
ENGINE = ("--engine", "scripted", "--engine-arg", "tokens=8")
RELAY = f"{shlex.quote(sys.executable)} {shlex.quote(relay_file)} {{port}}"
TWO = ("--workers", "2", "--migrate")
BODY = {"model": "m", "messages": [user("hi")]}

AGENT = """
    import json, socket, sys
    import httpx, openai
    base_url, api_key, admin_key, main_port = sys.argv[1:]
    client = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
    stream = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}], stream=True)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    root = httpx.URL(base_url).copy_with(path="/")
    admin = {"authorization": f"Bearer {admin_key}"}
    paths = ("/rl/sessions", "/engine", "/engine/servers", "/metrics", "/ready", "/ui", "/", "/rl/events")
    seen = {path: httpx.get(root.join(path), headers=admin).status_code for path in paths}
    for path in ("/rl/start_session", "/rl/set_reward", "/rl/end_session", "/trajectories/export", "/engine/models"):
        seen[path] = httpx.post(root.join(path), headers=admin, json={}).status_code
    reached = []
    for host in (root.host, "127.0.0.1"):
        try:
            socket.create_connection((host, int(main_port)), timeout=5).close()
            reached.append(host)
        except OSError:
            pass
    print(json.dumps({"said": said, "seen": seen, "reached": reached}))
"""


class Network:
    """A network of its own, from which this machine is reached at `host` only."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host

    def run(self, *command: str) -> str:
        done = subprocess.run(["ip", "netns", "exec", self.name, *command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def network() -> Iterator[Network]:
    """Skips where this user may not make a network namespace."""
    name, number = f"tg{secrets.token_hex(3)}", secrets.randbelow(250) + 1
    ours, theirs = f"{name}a", f"{name}b"
    here, there = f"10.213.{number}.1", f"10.213.{number}.2"
    steps = [
        f"ip netns add {name}",
        f"ip link add {ours} type veth peer name {theirs}",
        f"ip link set {theirs} netns {name}",
        f"ip addr add {here}/30 dev {ours}",
        f"ip link set {ours} up",
        f"ip netns exec {name} ip addr add {there}/30 dev {theirs}",
        f"ip netns exec {name} ip link set {theirs} up",
        f"ip netns exec {name} ip link set lo up",
    ]
    try:
        for step in steps:
            try:
                done = subprocess.run(step.split(), capture_output=True, text=True)
            except FileNotFoundError:
                pytest.skip("the command ip is not installed")
            if done.returncode:
                pytest.skip(f"no network namespace can be made here: {step}: {done.stderr.strip()}")
        yield Network(name, here)
    finally:
        for step in (f"ip netns del {name}", f"ip link del {ours}"):
            with contextlib.suppress(FileNotFoundError):
                subprocess.run(step.split(), capture_output=True)


def started(server: Process) -> Any:
    answer = httpx.post(f"{server.url}/rl/start_session", json={"task_id": "far"}, headers=ADMIN)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_an_agent_in_another_network_plays_its_session_and_reaches_nothing_else(
    tmp_path: Path, network: Network
) -> None:
    with server_process(tmp_path, *KEY, *ENGINE, "--agent-port", "0", "--agent-host", network.host) as server:
        session = started(server)
        assert urlsplit(session["base_url"]).hostname == network.host
        port = str(urlsplit(server.url).port)
        program = textwrap.dedent(AGENT)
        arguments = (session["base_url"], session["api_key"], ADMIN_KEY, port)
        told = json.loads(network.run(sys.executable, "-c", program, *arguments))
        assert told["said"] and told["reached"] == [] and set(told["seen"].values()) == {404}, told
        shown = httpx.get(f"{server.url}/rl/sessions/{session['session_id']}", headers=ADMIN).json()
        assert [turn["status"] for turn in shown["interactions"]] == ["complete"]
        server.terminate()
        assert server.wait() == 0


def test_a_tunnel_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with server_process(tmp_path, *KEY, *ENGINE, "--expose", RELAY, "--log-level", "debug") as server:
        base = started(server)["base_url"]
        assert f"  agents    {base.partition('/far')[0]}\n" in server.output
        assert httpx.post(f"{base}/chat/completions", json=BODY).status_code == 200
        (pid,) = map(int, re.findall(r"process (\d+), key", server.output))
        server.kill()
        until_gone(pid)


def until_gone(pid: int) -> None:
    for _ in range(3000):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has not ended")


def test_every_worker_serves_agents_and_gives_the_url_of_the_tunnel(tmp_path: Path, postgres_url: str) -> None:
    tunnel = ("--expose", RELAY, "--log-level", "debug")
    with server_process(tmp_path, *KEY, *ENGINE, *TWO, *tunnel, database_url=postgres_url) as server:
        sessions = [started(server) for _ in range(8)]  # over a connection each, of any worker
        (root,) = {session["base_url"].partition("/far")[0] for session in sessions}
        assert f"  agents    {root}\n" in server.output
        for session in sessions:
            assert httpx.post(f"{session['base_url']}/chat/completions", json=BODY).status_code == 200
            assert httpx.post(f"{root}/v1/chat/completions", json=BODY, headers=ADMIN).status_code == 401
            assert httpx.get(f"{root}/rl/sessions", headers=ADMIN).status_code == 404
        os.kill(workers_of(server)[0], signal.SIGKILL)  # it runs the tunnel, and its successor another one
        (before,) = map(int, re.findall(r"process (\d+), key", server.output))
        until_gone(before)
        for _ in range(3000):
            answer = httpx.post(f"{server.url}/rl/start_session", json={"task_id": "far"}, headers=ADMIN)
            if answer.status_code == 200 and not answer.json()["base_url"].startswith(f"{root}/"):
                break
            time.sleep(0.01)
        assert httpx.post(f"{answer.json()['base_url']}/chat/completions", json=BODY).status_code == 200
        server.terminate()
        assert server.wait() == 0
        assert "Traceback" not in server.output, server.output


def test_workers_do_not_start_without_their_tunnel(tmp_path: Path, postgres_url: str) -> None:
    flags = (*KEY, *ENGINE, *TWO, "--expose", "sh -c 'exit 3' {port}", "--database-url", postgres_url)
    ended = run("serve", "--port", "0", *flags, cwd=tmp_path)
    assert ended.returncode == 1 and re.search(r"--expose: .* ended with exit code 3", ended.stderr), ended.stderr
