"""Unmodified coding agents from the npm registry: their loop over two user messages is one sample.

The second message continues the session in a new process, or in the same one through the Agent Client Protocol.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.loop import MARK
from tests.conformance.npm import Install
from tests.conformance.served import Served
from tests.e2e.processes import server_process
from tests.exports import entries

pytestmark = pytest.mark.clients

RUN_TIMEOUT_S = 90
SECRET = "plum"
GOODBYE = "Until tomorrow."


@dataclass(frozen=True)
class Cli:
    """A client: its package, its command, and the configuration that points it at `{root}`, the address of a session.

    `again`: the command that sends another message to the session of `command`; None for clients that take both
    messages through the Agent Client Protocol. `{home}` in a command is the home folder; `{root}` is filled into
    `environment` and `files` (paths below its home, or below its repository after `repo/`). `sides`: the purposes of
    its side requests, such as titles. `chains`: the turns of the samples of its work. `shell`: the name of its shell
    tool, the parameter for a command, and the other arguments of that tool. `lingers`: appended to the command whose
    output is checked.
    """

    binary: str
    package: str
    command: tuple[str, ...]
    again: tuple[str, ...] | None
    shell: tuple[str, str, Mapping[str, Any]]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    asks_stdin: bool = False
    sides: frozenset[str] = frozenset()
    chains: tuple[int, ...] = (7,)
    lingers: str = ""


CODEX_CONFIG = """
model = "tokengrove"
model_provider = "tokengrove"
[model_providers.tokengrove]
name = "tokengrove"
base_url = "{root}/v1"
env_key = "AGENT_KEY"
wire_api = "responses"
[analytics]
enabled = false
"""
OPENCODE_CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "model": "tokengrove/model",
    "provider": {
        "tokengrove": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{root}/v1", "apiKey": "k"},
            "models": {"model": {"limit": {"context": 100_000, "output": 4096}}},
        }
    },
}
PI_MODELS = {
    "providers": {
        "tokengrove": {
            "baseUrl": "{root}/v1",
            "api": "openai-completions",
            "apiKey": "k",
            "models": [{"id": "model"}],
        }
    }
}
QWEN_SETTINGS = {
    "telemetry": {"enabled": False},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
    # Within a terminal of its own it loses the output of short commands.
    "tools": {"shell": {"enableInteractiveShell": False}},
}

GEMINI_SETTINGS = {
    "security": {"auth": {"selectedType": "gemini-api-key"}},
    "privacy": {"usageStatisticsEnabled": False},
    "general": {"enableAutoUpdate": False},
    "tools": {"shell": {"enableInteractiveShell": False}},
}


def gemini(command: tuple[str, ...], again: tuple[str, ...] | None, chains: tuple[int, ...]) -> Cli:
    """Google's Gemini CLI, with an API key."""
    always = ("-m", "model", "--yolo")
    return Cli(
        "gemini",
        "@google/gemini-cli@0.61.0",
        (*always, *command),
        None if again is None else (*always, *again),
        ("run_shell_command", "command", {"description": "d"}),
        {"GOOGLE_GEMINI_BASE_URL": "{root}", "GEMINI_API_KEY": "k", "GEMINI_CLI_TRUST_WORKSPACE": "true"},
        {".gemini/settings.json": json.dumps(GEMINI_SETTINGS)},
        chains=chains,
    )


def copilot(api: str) -> Cli:
    """GitHub Copilot CLI, with a provider of one's own."""
    return Cli(
        "copilot",
        "@github/copilot@1.0.102",
        ("--allow-all-tools", "-p"),
        ("--allow-all-tools", "--continue", "-p"),
        ("bash", "command", {"description": "d"}),
        {
            "COPILOT_PROVIDER_BASE_URL": "{root}" if api == "messages" else "{root}/v1",
            "COPILOT_PROVIDER_TYPE": "anthropic" if api == "messages" else "openai",
            "COPILOT_PROVIDER_WIRE_API": "responses" if api == "responses" else "completions",
            "COPILOT_PROVIDER_API_KEY": "k",
            "COPILOT_MODEL": "model",
            "COPILOT_OFFLINE": "true",
        },
    )


def continue_cli(provider: str) -> Cli:
    """Continue's CLI."""
    model = {
        **{"name": "m", "provider": provider, "model": "model", "apiBase": "{root}/v1", "apiKey": "k"},
        **{"roles": ["chat"], "capabilities": ["tool_use"]},
    }
    return Cli(
        "cn",
        "@continuedev/cli@1.5.47",
        ("--auto", "--config", "{home}/config.yaml", "-p"),
        ("--auto", "--config", "{home}/config.yaml", "--resume", "-p"),
        ("Bash", "command", {}),
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {"config.yaml": json.dumps({"name": "c", "version": "1.0.0", "schema": "v1", "models": [model]})},
    )


def cline(provider: str) -> Cli:
    """Cline's CLI. Only the Agent Client Protocol sends another message without a terminal."""
    settings = {"provider": provider, "apiKey": "k", "model": "model", "baseUrl": "{root}/v1"}
    known = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    return Cli(
        "cline",
        "cline@3.0.65",
        ("--acp",),
        None,
        ("run_commands", "commands", {}),
        {"CLINE_PROVIDER": provider, "CLINE_MODEL": "model", "CLINE_API_KEY": "k"},
        {".cline/data/settings/providers.json": json.dumps({"version": 1, "providers": {provider: known}})},
    )


CLIS = {
    "codex": Cli(
        "codex",
        "@openai/codex@0.169.0",
        ("exec", "--dangerously-bypass-approvals-and-sandbox"),
        ("exec", "--dangerously-bypass-approvals-and-sandbox", "resume", "--last"),
        ("exec_command", "cmd", {}),
        {"AGENT_KEY": "k"},
        {".codex/config.toml": CODEX_CONFIG},
    ),
    "claude": Cli(
        "claude",
        "@anthropic-ai/claude-code@2.1.329",
        ("--dangerously-skip-permissions", "-p"),
        ("--dangerously-skip-permissions", "--continue", "-p"),
        ("Bash", "command", {"description": "d"}),
        {
            "ANTHROPIC_BASE_URL": "{root}",
            "ANTHROPIC_AUTH_TOKEN": "k",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
            "IS_SANDBOX": "1",  # without it, root may not skip permission prompts
        },
    ),
    "opencode": Cli(
        "opencode",
        "opencode-ai@1.18.33",
        ("run",),
        ("run", "--continue"),
        ("bash", "command", {"description": "d"}),
        {"OPENCODE_DISABLE_AUTOUPDATE": "1", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        {"repo/opencode.json": json.dumps(OPENCODE_CONFIG)},
        asks_stdin=True,  # it quotes arguments with spaces
        sides=frozenset({"title"}),
    ),
    "pi": Cli(
        "pi",
        "@mariozechner/pi-coding-agent@0.73.1",
        ("--provider", "tokengrove", "--model", "model", "-p"),
        ("--provider", "tokengrove", "--model", "model", "--continue", "-p"),
        ("bash", "command", {}),
        {"PI_OFFLINE": "1", "PI_TELEMETRY": "0"},
        {".pi/agent/models.json": json.dumps(PI_MODELS)},
    ),
    "qwen": Cli(
        "qwen",
        "@qwen-code/qwen-code@0.24.4",
        ("--auth-type", "openai", "-y", "-p"),
        ("--auth-type", "openai", "-y", "--continue", "-p"),
        ("run_shell_command", "command", {"description": "d", "is_background": False}),
        {"OPENAI_BASE_URL": "{root}/v1", "OPENAI_API_KEY": "k", "OPENAI_MODEL": "model"},
        {".qwen/settings.json": json.dumps(QWEN_SETTINGS)},
        lingers="; sleep 0.5",  # on a busy machine it loses what a command prints just before it ends
        chains=(5, 2),  # when it continues a session, it leaves its note on the date out of the first message
    ),
    "gemini": gemini(("-p",), ("--resume", "latest", "-p"), (5, 3)),  # resumed, it sends each result twice
    "gemini-acp": gemini(("--acp",), None, (7,)),
    "copilot-chat": copilot("chat"),
    "copilot-responses": copilot("responses"),
    "copilot-messages": copilot("messages"),
    "continuedev-chat": continue_cli("openai"),
    "continuedev-messages": continue_cli("anthropic"),
    "cline-chat": cline("openai-compatible"),
    "cline-responses": cline("openai-native"),
    "cline-messages": cline("anthropic"),
}

ACP = Path(__file__).parent / "js" / "acp.mjs"


@pytest.mark.parametrize("name", CLIS)
def test_the_tool_loop_of_a_coding_agent_is_one_sample(
    name: str, install: Install, planned: Served, tmp_path: Path
) -> None:
    cli, session = CLIS[name], f"cli-{name}"
    programs = install(cli.binary, cli.package)
    first, second = run(cli, programs, planned.anthropic(session), tmp_path)
    assert SECRET in first
    assert GOODBYE in second
    interactions = planned.tree(session)
    export = httpx.post(f"{planned.url}/trajectories/export", json={"session_id": session, "layout": "concat"}).json()
    check(cli, interactions, entries(export)[session], export["samples"])
    package, _, version = cli.package.rpartition("@")
    planned.keep(session, package, version, {str(tmp_path): "/tmp/agent"})


def test_claude_code_keeps_its_model_names_where_models_are_declared(install: Install, tmp_path: Path) -> None:
    """It asks for names of its own, to which nothing but the session's start binds a route."""
    cli = CLIS["claude"]
    programs = install(cli.binary, cli.package)
    (tmp_path / "models.toml").write_text('[models.policy]\n[models.opponent]\nkind = "frozen"\nengine = "scripted"\n')
    flags = ["--engine", "tests.conformance.planned:PlannedEngine", "--models", str(tmp_path / "models.toml")]
    with server_process(tmp_path, *flags) as process:
        served = Served(process.url.rstrip("/"))
        bound = {"session_id": "bound", "models": {"*": "policy"}}
        httpx.post(f"{served.url}/rl/start_session", json=bound).raise_for_status()
        first, second = run(cli, programs, served.anthropic("bound"), tmp_path)
        assert SECRET in first and GOODBYE in second
        turns = served.tree("bound")
        assert {turn["route"] for turn in turns} == {"policy"}
        assert "policy" not in {turn["model"] for turn in turns}, "the names are its own"
        export = httpx.post(
            f"{served.url}/trajectories/export", json={"session_id": "bound", "layout": "concat"}
        ).json()
        check(cli, turns, entries(export)["bound"], export["samples"])
        body = {"model": turns[0]["model"], "max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}
        assert httpx.post(f"{served.url}/unbound/v1/messages", json=body).status_code == 404


def check(cli: Cli, interactions: list[Any], session: Mapping[str, Any], samples: list[Any]) -> None:
    """Check that no turn is missing or unaligned, and that the agent's work is one sample, each token trained once."""
    assert session["complete"]
    assert session["unaligned"] == session["aborted"] == session["failed"] == session["superseded"] == 0
    main = [sample for sample in samples if sample["purpose"] == "main"]
    assert [len(sample["interaction_ids"]) for sample in main] == list(cli.chains), interactions
    assert {sample["purpose"] for sample in samples} <= {"main", *cli.sides}
    sampled = sum(interaction["output_tokens"] for interaction in interactions)
    assert sum(sum(sample["loss_mask"]) for sample in samples) == sampled


def prompts(cli: Cli) -> tuple[str, str]:
    """Return messages whose plans have reasoning with and without text, parallel calls and a failing call."""
    name, parameter, more = cli.shell

    def call(command: str) -> dict[str, Any]:
        return {"name": name, "arguments": {parameter: [command] if parameter == "commands" else command, **more}}

    steps = [
        {"think": "I look\n\n  around first.", "say": "Let me look.", "calls": [call(f"cat notes.txt{cli.lingers}")]},
        {"think": "No words.", "calls": [call("echo one"), call("printf 'two  \\n three\\t'")]},
        {"calls": [call("echo five")]},
        {"say": "Spaces at the end:  \n\n", "calls": [call("false")]},
        {"think": "Done.", "say": "I found: {results}\n"},
    ]
    more_steps = [{"think": "Again.", "say": "Once more.", "calls": [call("echo six")]}, {"say": GOODBYE}]
    return f"Follow this. {MARK} {json.dumps(steps)}", f"And this. {MARK} {json.dumps(more_steps)}"


def run(cli: Cli, programs: Path, root: str, folder: Path) -> tuple[str, str]:
    """Give the client both messages in a repository with a secret in a file, and return what it prints for each."""
    home, repository = folder / "home", folder / "repo"
    for place in (home, repository):
        place.mkdir()
    (repository / "notes.txt").write_text(f"the secret word is {SECRET}\n")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True, timeout=20)
    for path, text in cli.files.items():
        target = folder / path if path.startswith("repo/") else home / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text.replace("{root}", root))
    command = [str(programs / cli.binary), *cli.command]
    own = environment(cli, programs, root, home)
    if cli.again is None:
        spoken = execute([str(programs / "node"), str(ACP), json.dumps(prompts(cli)), *command], repository, own)
        first, second = json.loads(spoken.splitlines()[-1])
        return first, second
    both = []
    for arguments, message in zip((cli.command, cli.again), prompts(cli), strict=True):
        filled = [str(programs / cli.binary), *(argument.replace("{home}", str(home)) for argument in arguments)]
        both.append(execute(filled, repository, own, message, cli.asks_stdin))
    return both[0], both[1]


def execute(
    command: list[str], folder: Path, environment: Mapping[str, str], message: str = "", asks_stdin: bool = False
) -> str:
    """Run a command with a message, and return what it prints."""
    done = subprocess.run(
        [*command, *([message] if message and not asks_stdin else [])],
        cwd=folder,
        env=environment,
        input=message if asks_stdin else "",
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def environment(cli: Cli, programs: Path, root: str, home: Path) -> dict[str, str]:
    """Return an environment that keeps only the program paths of the caller: no keys, no settings, no proxies."""
    folders = {f"XDG_{kind}_HOME": str(home / kind.lower()) for kind in ("CONFIG", "DATA", "CACHE", "STATE")}
    own = {name: value.replace("{root}", root) for name, value in cli.environment.items()}
    path = f"{programs}:{os.environ['PATH']}"
    return {"PATH": path, "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", **folders, **own}
