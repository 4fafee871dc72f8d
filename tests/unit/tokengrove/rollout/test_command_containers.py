"""A command in a container: the prefix that leads there, what it is told, and that nothing runs on in it.

`docker` is a stand-in here, which keeps what was asked of it: it runs commands on this machine with the variables that
it was given by name, and its containers are processes that only `docker rm` ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import let_pass, real_server, until
from tests.unit.tokengrove.rollout.command_episodes import CURL, KEY, Commands, sh
from tests.unit.tokengrove.rollout.test_command_agent import alive
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.episodes import RewardFailed, play

DOCKER = r"""#!PYTHON
import json, os, signal, subprocess, sys
from pathlib import Path

state = Path(__file__).parent / "state"
state.mkdir(exist_ok=True)
verb, *words = sys.argv[1:]
with open(state / "calls", "a") as calls:
    calls.write(json.dumps([verb, *words, sorted(os.environ)]) + "\n")
if verb == "rm":
    for name in words[1:]:
        pid = int((state / name).read_text())
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    sys.exit()
options, given, name, folder = {"-w": "folder", "--name": "name"}, {"PATH": os.environ["PATH"]}, None, "/"
while words[0].startswith("-"):
    option = words.pop(0)
    if option == "-e":
        variable, mark, value = words.pop(0).partition("=")
        given[variable] = value if mark else os.environ[variable]
    elif option in ("-w", "--name", "-v"):
        value = words.pop(0)
        name, folder = (value, folder) if option == "--name" else (name, value) if option == "-w" else (name, folder)
given["HOME"] = "/nonexistent"
process = subprocess.Popen(words[1:], env=given, cwd=folder, start_new_session=True)
if verb == "run":
    (state / f"{name}.new").write_text(str(process.pid))
    os.rename(state / f"{name}.new", state / name)
code = process.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
RUN = "docker run --rm -i {variables} -v {workdir}:{workdir} -w {workdir} image"


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with real_server(
        tmp_path_factory.mktemp("containers"), engine_arg=("play=babble", "tokens=4"), admin_key=KEY
    ) as url:
        yield Commands(url)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the stand-in keeps its calls."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER.replace("PYTHON", sys.executable))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_HOST", "tcp://docker")
    monkeypatch.setenv("A_TOKEN_OF_THE_CALLER", "secret")
    return program.parent / "state"


def calls(docker: Path, verb: str) -> list[list[Any]]:
    """The calls with this verb: their words, and the names of the variables of `docker` itself at the end."""
    found = [json.loads(line) for line in (docker / "calls").read_text().splitlines()]
    return [words[1:] for words in found if words[0] == verb]


async def test_a_command_in_a_container_is_exported_and_verified_there(commands: Commands, docker: Path) -> None:
    verifier = 'grep -q chat.completion reply && test "$HOME" = /nonexistent && test -z "$OPENAI_API_KEY"'
    words = ("sh", "-ec", f'test -z "$A_TOKEN_OF_THE_CALLER$DOCKER_HOST"; ({CURL[:-1]}) > reply')
    result = await commands.played(*words, container=RUN, verifier=verifier)
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, 1.0, 1)
    command, *_ = calls(docker, "run")
    assert "A_TOKEN_OF_THE_CALLER" not in command[-1]
    assert {"DOCKER_HOST", "HOME", "OPENAI_API_KEY"} < {*command[-1]}
    async with AsyncClient(commands.url, KEY) as client:
        (sample,) = (await client.export(session_id=result.session_id)).samples
    assert sample.loss_mask.sum() == 4


async def test_no_key_is_on_the_command_line_where_variables_go_by_name(commands: Commands, docker: Path) -> None:
    plan = commands.plan("true", container=RUN)
    async with commands.episode(plan) as episode:
        await CommandAgent(plan.agent).play(episode)
        (command,) = calls(docker, "run")
        assert episode.session.api_key not in json.dumps(command)
    at = command.index("OPENAI_API_KEY")
    assert command[at - 1] == "-e"
    names = [command[index + 1] for index, word in enumerate(command[:-1]) if word == "-e"]
    assert not {"HOME", "PATH"} & {*names}


async def test_the_container_of_a_command_that_ran_too_long_is_removed(
    commands: Commands, docker: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = tmp_path / "pid"
    plan = commands.plan(
        *sh(f"echo $$ > {note}.new; mv {note}.new {note}", "sleep 1000"), container=RUN, command_timeout_s=900
    )
    playing = asyncio.ensure_future(play(plan, CommandAgent(plan.agent)))
    await until(note.exists)
    await let_pass(901, monkeypatch)
    assert (await playing).failure == "timeout"
    ((_, name, *_),) = calls(docker, "rm")
    assert name.startswith("tokengrove-")
    assert not alive(int(note.read_text()))


async def test_a_container_of_its_own_is_started_entered_and_stopped(
    commands: Commands, docker: Path, tmp_path: Path
) -> None:
    options = {
        "container_start": f'mkdir "{tmp_path}/{{container}}"; echo "$A_TOKEN_OF_THE_CALLER" > {tmp_path}/started',
        "container": "docker exec -i {variables} {container}",
        "container_workdir": f"{tmp_path}/{{container}}/work",
        "container_stop": f'mv "{tmp_path}/{{container}}" {tmp_path}/stopped',
        "verifier": 'test "$PWD" = {workdir} && cmp left "$VERIFIER_FILES/expected" && echo 0.5 > "$REWARD_FILE"',
        "verifier_files": str(tmp_path / "tests"),
    }
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "expected").write_text("Name a tree. there")
    words = sh(
        'test "$PWD" = {workdir}', "setsid sleep 1000 & echo $! > pid", 'printf "$1" > left', "test -z $VERIFIER_FILES"
    )
    plan = commands.plan(*words, "sh", "{prompt} there", **options)
    async with commands.episode(plan) as episode:
        assert await CommandAgent(plan.agent).play(episode) == 0.5
    left = tmp_path / "stopped" / "work"
    assert (left / "left").read_text() == "Name a tree. there"
    assert not alive(int((left / "pid").read_text()))
    assert (tmp_path / "started").read_text() == "secret\n"


@pytest.mark.parametrize("forged", ["ln -s /etc/hostname $REWARD_FILE", "mkfifo $REWARD_FILE", "mkdir $REWARD_FILE"])
async def test_what_is_no_reward_file_is_refused_in_a_container_too(
    commands: Commands, docker: Path, forged: str
) -> None:
    with pytest.raises(RewardFailed, match=r"reward\.txt is (a link|not a file)"):
        await commands.rewarded("true", container=RUN, verifier=forged)


async def test_a_prefix_without_variables_by_name_and_with_a_shell_gets_one_text(
    commands: Commands, tmp_path: Path
) -> None:
    """As ssh does it, whose words are joined and read by a shell."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec env -i PATH="$PATH" /bin/sh -c "$*"\n')
    ssh.chmod(0o755)
    data = {"prompt": 'it\'s "quoted" $HOME; exit 1'}
    words = ("sh", "-c", 'test -n "$OPENAI_API_KEY" && printf %s "$1" > said', "sh", "{prompt}")
    verifier = 'test "$(cat said)" = "it\'s \\"quoted\\" \\$HOME; exit 1"'
    options = {"container": f"{ssh} host {{command}}", "container_workdir": f"{tmp_path}/there"}
    assert await commands.rewarded(*words, data=data, verifier=verifier, **options) == 1.0


async def test_a_verifier_on_the_host_sees_what_the_container_left(commands: Commands, docker: Path) -> None:
    options = {"verifier_on_host": True, "verifier": 'test -e left && test -n "$HOME" -a "$HOME" != /nonexistent'}
    assert await commands.rewarded(*sh("touch left"), container=RUN, **options) == 1.0
    assert len(calls(docker, "run")) == 1


async def test_a_container_that_does_not_start_fails_the_episode_and_is_stopped(
    commands: Commands, tmp_path: Path
) -> None:
    options = {
        "container_start": "echo no image; exit 125",
        "container_stop": f"echo {{container}} > {tmp_path}/stopped",
    }
    with pytest.raises(InvalidRequest, match="container_start exited with 125: no image"):
        await commands.rewarded("true", container="env", **options)
    assert (tmp_path / "stopped").read_text().startswith("tokengrove-command-")


async def test_the_servers_address_may_be_another_one_in_a_container(commands: Commands, tmp_path: Path) -> None:
    url = "http://host.internal:99/under"
    printed = await commands.printed('echo "$OPENAI_BASE_URL $ANTHROPIC_BASE_URL {root_url}"', tmp_path, server_url=url)
    base, root, filled = printed.split()
    assert root == filled
    assert base == f"{root}/v1"
    assert root.startswith(f"{url}/")
    assert len(root) > len(url) + 8
