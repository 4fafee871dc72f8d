"""Unmodified JavaScript clients run `loop` over each API that they speak; each session exports as one chain.

`TOKENGROVE_TEST_JS`: a folder where the packages of `js/package.json` are installed; otherwise they are installed
into a temporary folder. The scripts in `js` are what a user would write: a client, a tool, and a conversation.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conformance import loop
from tests.conformance.npm import npm_install
from tests.conformance.served import Served, assert_one_chain

pytestmark = pytest.mark.clients

SCRIPTS = Path(__file__).parent / "js"
RUN_TIMEOUT_S = 60
THREE = ("chat", "responses", "messages")
CLIENTS = {
    "agents": ("@openai/agents", ("chat", "responses")),
    "ai": ("ai", (*THREE, "compatible")),
    "ai6": ("ai6", (*THREE, "compatible")),
    "anthropic": ("@anthropic-ai/sdk", ("messages",)),
    "claude": ("@anthropic-ai/claude-agent-sdk", ("messages",)),
    "deepagents": ("deepagents", THREE),
    "langchain": ("langchain", THREE),
    "mastra": ("@mastra/core", (*THREE, "router")),
    "openai": ("openai", ("chat", "responses")),
    "strands": ("@strands-agents/sdk", ("responses", "messages")),
}
"""The package of each script, and the APIs; `compatible` and `router` are chat through other classes."""
TOOLS = {"claude": "mcp__places__get_weather"}
"""The name of the tool where it is not that of the loop."""
STREAMED = frozenset({"claude", "strands"})
"""The clients that always stream."""
CASES = [
    (client, api, stream)
    for client, (_, apis) in CLIENTS.items()
    for api in apis
    for stream in (False, True)
    if stream or client not in STREAMED
]


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the scripts and their packages, among them a node that all of them run on."""
    given = os.environ.get("TOKENGROVE_TEST_JS")
    folder = tmp_path_factory.mktemp("js")
    shutil.copytree(SCRIPTS, folder, dirs_exist_ok=True)
    if given:
        (folder / "node_modules").symlink_to(Path(given) / "node_modules")
    else:
        npm_install(folder)
    return folder


def version(installed: Path, package: str) -> str:
    found: str = json.loads((installed / "node_modules" / package / "package.json").read_text())["version"]
    return found


@pytest.mark.parametrize(("client", "api", "stream"), CASES)
def test_the_loop_of_a_javascript_client_is_one_chain(
    client: str, api: str, stream: bool, installed: Path, planned: Served
) -> None:
    session = f"js-{client}-{api}{'-stream' if stream else ''}"
    prompts = [message.replace("get_weather", TOOLS.get(client, "get_weather")) for message in loop.MESSAGES]
    given = {"root": planned.anthropic(session), "api": api, "stream": stream, "prompts": prompts}
    done = subprocess.run(
        [installed / "node_modules" / ".bin" / "node", installed / f"{client}.mjs", json.dumps(given)],
        cwd=installed,
        env={"PATH": os.environ["PATH"], "HOME": str(installed)},
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = json.loads(done.stdout.splitlines()[-1])
    assert [answer.strip() for answer in answers] == list(loop.ANSWERS)
    assert_one_chain(planned, session, turns=loop.TURNS)
    if stream:  # what clients send differs by the field `stream` only
        package = CLIENTS[client][0]
        planned.keep(session, package, version(installed, package), {str(installed): "/home/agent"})
