"""Unmodified coding agents as commands of a rollout: they work on a task folder, and a verifier looks at what they did.

Their command lines are those of docs/command-agents.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.loop import MARK
from tests.conformance.npm import Install
from tests.conformance.packages import package
from tests.conformance.served import Served, assert_trained_once
from tests.conformance.test_clis import CLIS

pytestmark = pytest.mark.clients

CODEX_PROVIDER = (
    'model_providers.here={name="here",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
)


@dataclass(frozen=True)
class Line:
    """A command line, and the options that it needs. `cli`: its entry in `CLIS`."""

    cli: str
    words: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)


LINES = {
    "claude": Line(
        "claude",
        ("claude", "--dangerously-skip-permissions", "-p", "{prompt}"),
        {"env": {"IS_SANDBOX": "1"}, "clone": "repository"},
    ),
    "codex": Line(
        "codex",
        ("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
        {"copy": "folder"},
    ),
    "codex-c": Line(
        "codex",
        (
            *("codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
            *("-c", "model_provider=here", "-c", CODEX_PROVIDER, "-"),
        ),
        {"copy": "folder"},
    ),
    "opencode": Line("opencode", ("opencode", "run"), {"worktree": "repository"}),
}


@pytest.mark.parametrize("name", LINES)
async def test_a_coding_agent_edits_a_file_and_a_verifier_rewards_it(
    name: str, install: Install, planned: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needed in ("httpx", "numpy", "orjson"):
        package(needed)
    line = LINES[name]
    cli = CLIS[line.cli]
    programs = install(cli.binary, cli.package)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    result = await played(name, line, planned.url, tmp_path, task(cli.shell))
    assert (result.failure, result.message, result.reward) == (None, None, 1.0), outputs(tmp_path)
    tree = planned.tree(result.session_id)
    main = [node["id"] for node in tree if node["purpose"] == "main"]
    assert len(main) == 3, outputs(tmp_path)
    assert_trained_once(planned, result.session_id, *([3] if len(tree) == 3 else [1, 3]))


def task(shell: tuple[str, str, Mapping[str, Any]]) -> dict[str, Any]:
    """A task whose prompt has the plan of a model that looks at the file, and mends it."""
    name, parameter, more = shell
    commands = ("cat answer.txt", "printf 'four\\n' > answer.txt")
    calls = [{"name": name, "arguments": {parameter: command, **more}} for command in commands]
    steps = [*({"say": "I look.", "calls": [call]} for call in calls), {"say": "It is mended."}]
    return {"prompt": f"Mend the answer. {MARK} {json.dumps(steps)}", "expected": "four"}


async def played(name: str, line: Line, url: str, folder: Path, data: Mapping[str, Any]) -> Any:
    from tokengrove.rollout.command import CommandAgent
    from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task, play

    places = {"folder": folder / "task", "repository": folder / "task"}
    make_repository(folder / "task")
    options = {
        key: str(places.get(value, value)) if isinstance(value, str) else value for key, value in line.options.items()
    }
    options |= {"verifier": 'test "$(cat answer.txt)" = {data.expected}', "keep_output": str(folder / "outputs")}
    if "copy" in options:
        options["setup"] = "rm -rf .git"
    spec = AgentSpec("command", words=line.words, arguments={**options, "command_timeout_s": 120})
    plan = EpisodePlan(Task(name, data), 0, 0, Server(url), spec, f"command-{name}")
    return await play(plan, CommandAgent(spec))


def make_repository(folder: Path) -> None:
    import subprocess

    folder.mkdir()
    (folder / "answer.txt").write_text("five\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "start"]):
        named = ["git", "-c", "user.name=t", "-c", "user.email=t@localhost", *words]
        subprocess.run(named, cwd=folder, check=True, timeout=60)


def outputs(folder: Path) -> str:
    """What the command has written."""
    return "\n".join(file.read_text()[-3000:] for file in (folder / "outputs").iterdir())
