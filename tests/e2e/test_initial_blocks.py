"""No secret is in the block of variables that other processes of the same user can read of ours (/proc/PID/environ)."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.processes import execute, server_process
from tests.e2e.test_workers import workers_of

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc on this system"),
]

KEY = "marked-5c1f-admin-key-of-the-test"
SECRETS = {
    "TOKENGROVE_ADMIN_KEY": KEY,
    "OPENAI_API_KEY": "sk-marked-5c1f-openai",
    "HF_TOKEN": "hf-marked-5c1f",
    "MY_DATABASE": "postgresql://u:marked-5c1f-password@127.0.0.1/x",
}
LOOK = """
import json, os, pathlib
found = []
for block in pathlib.Path("/proc").glob("[0-9]*/environ"):
    try:
        if b"marked-5c1f" in block.read_bytes():
            found.append((block.parent / "cmdline").read_bytes().decode())
    except OSError:
        pass
own = [name for name, value in os.environ.items() if "marked-5c1f" in value]
pathlib.Path(os.environ["LOOKED"]).write_text(json.dumps([found, own]))
"""
PLAYER = """
import asyncio, json, os
from pathlib import Path

def judged(task, base_url):
    seen = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "HF_TOKEN", "TOKENGROVE_ADMIN_KEY")}
    Path("judged").write_text(json.dumps(seen))
    exec(Path("look.py").read_text())
    return 1.0
"""


def found_in_blocks() -> list[str]:
    """The processes of this machine whose blocks have one of the secrets."""
    found = []
    for block in Path("/proc").glob("[0-9]*/environ"):
        try:
            if b"marked-5c1f" in block.read_bytes():
                found.append(f"{block}: {(block.parent / 'cmdline').read_bytes()!r}")
        except OSError:
            continue
    return found


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("secrets")
def test_a_server_and_its_workers_show_no_secret_and_take_the_key(tmp_path: Path, postgres_url: str) -> None:
    flags = ("--engine", "scripted", "--workers", "2", "--migrate")
    with server_process(tmp_path, *flags, database_url=postgres_url, python=sys.executable) as server:
        assert len(workers_of(server)) == 2
        assert not found_in_blocks()
        for number in (server.pid, *workers_of(server)):
            assert b"PATH=" in Path(f"/proc/{number}/environ").read_bytes()  # what is no secret stays
        for key, status in ((KEY, 200), ("another", 403)):
            headers = {"authorization": f"Bearer {key}"}
            assert httpx.get(f"{server.url}/rl/sessions", headers=headers).status_code == status


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_a_command_agent_finds_no_secret_of_its_callers(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    monkeypatch.setenv("LOOKED", str(tmp_path / "looked"))
    script = LOOK.replace('os.environ["LOOKED"]', repr(str(tmp_path / "looked")))
    server = ("--server", "engine=scripted")
    execute(command, "--data", "tasks.jsonl", *server, "--", sys.executable, "-c", script, cwd=tmp_path)
    assert json.loads((tmp_path / "looked").read_text()) == [[], []]


@pytest.mark.usefixtures("secrets")
@pytest.mark.parametrize("executor", [(), ("--executor", "process")])
def test_functions_of_the_user_keep_his_keys_and_have_none_of_the_server(
    tmp_path: Path, executor: tuple[str, ...]
) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"prompt": "hi"}\n')
    (tmp_path / "player.py").write_text(PLAYER)
    (tmp_path / "look.py").write_text(LOOK.replace('os.environ["LOOKED"]', repr(str(tmp_path / "looked"))))
    execute("eval", "player:judged", "--data", "tasks.jsonl", "--server", "engine=scripted", *executor, cwd=tmp_path)
    seen = json.loads((tmp_path / "judged").read_text())
    assert seen == {name: SECRETS[name] for name in ("OPENAI_API_KEY", "HF_TOKEN")} | {"TOKENGROVE_ADMIN_KEY": None}
    assert json.loads((tmp_path / "looked").read_text())[0] == []


def test_the_block_of_this_process_has_none_of_them() -> None:
    assert not found_in_blocks() and os.environ.get("HF_TOKEN") != SECRETS["HF_TOKEN"]
