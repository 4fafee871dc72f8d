"""Unmodified coding agents whose context fills up, and that call sub-agents: their conversations are one lineage.

Each is driven at the smallest window that it allows, or that leaves room for its own prompt.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.loop import MAIN_TASK, SUB_TASK
from tests.conformance.npm import Install
from tests.conformance.served import Served
from tests.conformance.test_clis import CLIS, Cli, environment, execute
from tests.e2e.processes import server_process

pytestmark = pytest.mark.clients

READS = 9
"""Reads of a large file by the main agent. Every third or so fills the window."""
TASK = f"{MAIN_TASK}: read all parts of big.txt, then say done."
PROMPT = f"{SUB_TASK}: look at notes.txt\n\n  and tell me the  secret word.\n"
ANSWER = "The  secret word is **plum**.\n\nSUB DONE."


@dataclass(frozen=True)
class Window:
    """How a client's window is made small, and the tool that calls a sub-agent, with its arguments but the prompt.

    `prompt`: the argument with the prompt. `waits`: the call that waits for the sub-agent, if the first does not.
    `summary`: what the model answers to a request for a summary.
    """

    cli: Cli
    summary: str
    tool: str
    prompt: str
    arguments: Mapping[str, Any]
    waits: Mapping[str, Any] | None = None


def small(name: str, **more: Any) -> Cli:
    return replace(CLIS[name], **more)


CLAUDE = CLIS["claude"]
CODEX = CLIS["codex"]
OPENCODE = CLIS["opencode"]
WINDOWS = {
    "claude": Window(
        # It takes no window below 100,000 tokens; half of what is left after 20,000 for the answer is 40,000.
        small(
            "claude",
            environment={
                **CLAUDE.environment,
                "CLAUDE_CODE_AUTO_COMPACT_WINDOW": "100000",
                "CLAUDE_AUTOCOMPACT_PCT_OVERRIDE": "50",
            },
        ),
        "<analysis>\nI look back: {n}\n</analysis>\n\n<summary>\n1. Primary Request and Intent:\n   Lines are read."
        "   Summary {n}, written by the model.\n\n\n9. Next: go on with  two  spaces\n</summary>\n",
        *("Agent", "prompt"),
        {"description": "read the notes", "subagent_type": "general-purpose", "run_in_background": False},
    ),
    "codex": Window(
        # It takes any limit; 35,000 leaves room for its own prompt of 21,000.
        small(
            "codex",
            files={path: f"model_auto_compact_token_limit = 35000\n{text}" for path, text in CODEX.files.items()},
        ),
        "Handoff summary {n}, written by the model.\n\n\n- the user wants lines read:   <b>two</b>  spaces \n- go on\n",
        *("spawn_agent", "message"),
        {},
        {"name": "wait_agent", "arguments": {"targets": ["{agent_id}"], "timeout_ms": 20000}},
    ),
    "opencode": Window(
        # It takes any limit; 32,000 leaves room for its own prompt of 17,000.
        small(
            "opencode",
            files={
                path: text.replace("100000", "32000").replace("4096", "2000") for path, text in OPENCODE.files.items()
            },
        ),
        "## Goal\n\n- summary   {n}, written by the model\n\n\n## Next  Steps\n<b>go on</b> \n",
        *("task", "prompt"),
        {"description": "read the notes", "subagent_type": "general"},
    ),
}


def call(cli: Cli, command: str) -> dict[str, Any]:
    name, parameter, more = cli.shell
    return {"name": name, "arguments": {parameter: command, **more}}


def played(window: Window, plan: Mapping[str, Any], install: Install, folder: Path) -> tuple[str, list[Any], Any]:
    """Let the client do its task. Return what it prints, its turns, and the entry of its session in an export."""
    home, repository = folder / "home", folder / "repo"
    for place in (home, repository):
        place.mkdir()
    lines = (f"line {at}: the quick brown fox number {at} jumps over the lazy dog\n" for at in range(2000))
    (repository / "big.txt").write_text("".join(lines))
    (repository / "notes.txt").write_text("the secret word is plum\n")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True, timeout=20)
    (folder / "plan.json").write_text(json.dumps({**plan, "summary": window.summary}))
    flags = ["--engine", "tests.conformance.compacting:CompactingEngine", "--served-model-name", "agent-model"]
    with server_process(folder, *flags, "--engine-arg", f"plan={folder / 'plan.json'}") as process:
        served = Served(process.url.rstrip("/"))
        cli, root = window.cli, served.anthropic("s")
        for path, text in cli.files.items():
            target = folder / path if path.startswith("repo/") else home / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text.replace("{root}", root))
        programs = install(cli.binary, cli.package)
        command = [str(programs / cli.binary), *cli.command]
        printed = execute(command, repository, environment(cli, programs, root, home), TASK, cli.asks_stdin)
        body = {"session_id": "s", "layout": "concat"}
        export = httpx.post(f"{served.url}/trajectories/export", json=body).json()
        return printed, served.tree("s"), export["sessions"][0]


def lineage_of(turns: list[Any]) -> list[tuple[int, list[int], str, str]]:
    """Of each conversation that came from another: its first turn, the turns that it came from, kind and evidence."""
    numbers = {turn["interaction_id"]: turn["turn"] for turn in turns}
    found = [(turn["turn"], turn["notes"]["lineage"]) for turn in turns if "lineage" in turn["notes"]]
    return [(at, [numbers[each] for each in told["from"]], told["kind"], told["evidence"]) for at, told in found]


@pytest.mark.parametrize("name", WINDOWS)
def test_the_conversations_of_a_compacted_agent_are_one_lineage(name: str, install: Install, tmp_path: Path) -> None:
    window = WINDOWS[name]
    reads = [
        {"say": f"I read part {at}.", "calls": [call(window.cli, f"sed -n '{at * 100 + 1},{at * 100 + 150}p' big.txt")]}
        for at in range(READS)
    ]
    printed, turns, entry = played(window, {"main": [*reads, {"say": "MAIN DONE."}], "sub": []}, install, tmp_path)
    assert "MAIN DONE." in printed
    main = [turn for turn in turns if turn["purpose"] == "main"]
    summaries = {turn["turn"] for turn in turns if turn["purpose"] == "summary"}
    begun = [turn["turn"] for turn in main if turn["parent_id"] is None]
    assert len(summaries) >= 2 and len(begun) == len(summaries) + 1
    links = {at: (sources, kind, evidence) for at, sources, kind, evidence in lineage_of(turns)}
    assert begun[0] not in links
    for at in begun[1:]:
        sources, kind, evidence = links.pop(at)
        assert (kind, evidence) == ("compaction", "summary")
        assert sources[0] == max(each for each in summaries if each < at), "the newest summary"
    assert {kind for _, kind, _ in links.values()} <= {"summary"}, "summaries asked for in conversations of their own"
    assert len(entry["lineage"]) == len(lineage_of(turns))
    assert len({link["first"] for link in entry["lineage"]}) == 1


@pytest.mark.parametrize("name", WINDOWS)
def test_a_sub_agent_comes_from_the_turn_that_called_it(name: str, install: Install, tmp_path: Path) -> None:
    window = WINDOWS[name]
    look = {"say": "First a look.", "calls": [call(window.cli, "cat notes.txt")]}
    ask = {"name": window.tool, "arguments": {**window.arguments, window.prompt: PROMPT}}
    waits = [] if window.waits is None else [{"say": "I wait.", "calls": [window.waits]}]
    main = [look, {"say": "I ask an agent.", "calls": [ask]}, *waits, {"say": "MAIN DONE."}]
    sub = [{"say": "I look.", "calls": [call(window.cli, "cat notes.txt")]}, {"say": ANSWER}]
    printed, turns, _ = played(window, {"main": main, "sub": sub}, install, tmp_path)
    assert "MAIN DONE." in printed
    (link,) = lineage_of(turns)
    child = next(turn for turn in turns if turn["turn"] == link[0])
    caller = next(turn for turn in turns if turn["turn"] == link[1][0])
    assert link[2:] == ("subagent", "call")
    assert (child["purpose"], caller["purpose"]) == ("subagent", "main")
    assert [turn["purpose"] for turn in turns].count("subagent") == 2
