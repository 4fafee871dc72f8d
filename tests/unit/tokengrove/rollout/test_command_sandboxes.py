"""A command in a remote sandbox: what is copied there and back, what it is told, and what is refused.

The provider is a folder of this machine, so the sandbox reaches the server of the test.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server, until
from tests.unit.tokengrove.rollout.command_episodes import CURL, KEY, Commands, sh
from tests.unit.tokengrove.rollout.folder_sandbox import PARENT, FolderSandbox, made
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.episodes import AgentSpec, RewardFailed, Task, play
from tokengrove.rollout.run_options import RunOptions
from tokengrove.rollout.sandboxes import remote_sandbox
from tokengrove.runs.agents import check_agent

PLACE = {
    "sandbox": "tests.unit.tokengrove.rollout.folder_sandbox:FolderSandbox",
    "sandbox_args": {"max_concurrent": 4},
}
given: list[tuple[Path, str]] = []


def by_function(workdir: Path, output: str) -> float:
    given.append((workdir, output))
    assert not (workdir / "away").exists()
    return float((workdir / "answer.txt").read_text())


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with real_server(
        tmp_path_factory.mktemp("sandboxes"), engine_arg=("play=babble", "tokens=4"), admin_key=KEY
    ) as url:
        yield Commands(url)


@pytest.fixture(autouse=True)
def near(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(PARENT, str(tmp_path / "sandboxes"))
    monkeypatch.setattr(FolderSandbox, "elsewhere", False)
    yield
    assert made() == []


def repository(path: Path) -> Path:
    """A repository with two commits."""
    path.mkdir()
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    for words in (
        ["init", "--quiet"],
        [*who, "commit", "--quiet", "--allow-empty", "--message", "first"],
        [*who, "commit", "--quiet", "--allow-empty", "--message", "second"],
    ):
        subprocess.run(["git", "-C", str(path), *words], check=True)
    return path


async def test_an_agent_turns_and_is_verified_in_the_sandbox(commands: Commands, tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    (source / "given.txt").write_text("an oak")
    (source / "run.sh").write_text("exit 0")
    (source / "run.sh").chmod(0o755)
    (tests := tmp_path / "tests").mkdir()
    (tests / "expected").write_text("an oak")
    words = sh(
        f"({CURL[:-1]}) > reply",
        "./run.sh; cp given.txt answer.txt",
        'test "$PWD" = {workdir}; test "$HOME" = {home}; test -f ~/.codex/config.toml; test -f ~/.agent/settings',
        'grep -q "Name a tree." "$TOKENGROVE_PROMPT_FILE" "$TOKENGROVE_TASK_FILE"',
        'test "$(cat)" = "Name a tree."; test "$OWN" = 1; test -z "$VERIFIER_FILES"',
    )
    verifier = (
        'test -z "$OPENAI_API_KEY" && cmp answer.txt "$VERIFIER_FILES/expected" && grep -q completion reply'
        ' && echo 0.5 > "$REWARD_FILE"'
    )
    options = {
        **{"copy": str(source), "verifier": verifier, "verifier_files": str(tests), "env": {"OWN": "1"}, **PLACE},
        **{"setup": "test -f given.txt", "files": {"~/.agent/settings": "{base_url}"}},
    }
    result = await commands.played(*words, **options)
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, 0.5, 1)


async def test_the_key_of_the_session_is_in_no_file_of_the_sandbox(commands: Commands, tmp_path: Path) -> None:
    script = 'grep -rl "$OPENAI_API_KEY" "$HOME" "$TMPDIR" . || echo none'
    assert await commands.printed(script, tmp_path, **PLACE) == "none\n"


async def test_each_task_can_have_its_own_image(commands: Commands, tmp_path: Path) -> None:
    options = {**PLACE, "sandbox_args": {"max_concurrent": 1, "image": "of-{data.tree}"}}
    assert await commands.printed("cat ~/image", tmp_path, data={"tree": "oak", "prompt": ""}, **options) == "of-oak"


async def test_a_function_and_a_verifier_on_this_machine_get_the_folder(commands: Commands, tmp_path: Path) -> None:
    words = sh("echo 0.25 >answer.txt; ln -s /etc/passwd away; ln -s answer.txt near; echo said")
    assert await commands.rewarded(*words, verifier_function=f"{__name__}:by_function", **PLACE) == 0.25
    assert given.pop()[1] == "said\n"
    verifier = 'cd "{workdir}" && test ! -L away && test -L near && cat near'
    assert await commands.rewarded(*words, verifier=verifier, verifier_on_host=True, **PLACE) == 0.25


async def test_a_clone_in_a_sandbox_needs_no_other_repository(commands: Commands, tmp_path: Path) -> None:
    source = repository(tmp_path / "source")
    options = {"clone": str(source), "setup": f"mv {source} {source}.away", **PLACE}
    script = "git log --format=%s; git fsck --strict 2>/dev/null >&2 && test ! -e .git/objects/info/alternates"
    assert (await commands.printed(script, tmp_path, **options)) == "second\nfirst\n"


async def test_a_command_that_ran_too_long_is_killed_and_its_files_are_verified(commands: Commands) -> None:
    words = sh("echo begun >answer.txt", "sleep 1000")
    options = {"command_timeout_s": 2, "verify_timed_out": True, "verifier": "grep -q begun answer.txt", **PLACE}
    assert await commands.rewarded(*words, **options) == 1.0


async def test_the_sandbox_of_an_interrupted_episode_is_deleted(commands: Commands) -> None:
    plan = commands.plan("sleep", "1000", **PLACE)
    playing = asyncio.create_task(play(plan, CommandAgent(plan.agent)))
    await until(lambda: any(each.glob("tmp/.tokengrove-*/0/pid") for each in made()))
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


async def test_a_provider_that_fails_is_a_failure_that_a_run_retries(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: FolderSandbox, labels: object) -> None:
        raise ConnectionError("the quota is used up")

    monkeypatch.setattr(FolderSandbox, "create", fail)
    result = await commands.played("true", **PLACE)
    assert (result.failure, "the quota is used up" in (result.message or "")) == ("worker", True)


async def test_a_folder_that_is_too_large_to_be_fetched_is_a_failure_of_the_reward(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_sandbox, "DOWNLOAD_BYTES", 1000)
    options = {"verifier_function": f"{__name__}:by_function", **PLACE}
    with pytest.raises(RewardFailed, match=r"cannot be copied.*more than"):
        await commands.rewarded(*sh("head -c 2000 /dev/urandom >data"), **options)


async def test_a_class_that_is_no_provider_is_a_place_as_well(commands: Commands, tmp_path: Path) -> None:
    options = {"sandbox": "tokengrove.rollout.sandboxes:LocalProcessSandbox", "files": {"note": "x"}}
    assert await commands.printed("cat note; cat", tmp_path, **options) == "xName a tree."


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"container": "docker run image", **PLACE}, "give --container or --sandbox, not both"),
        ({"worktree": ".", **PLACE}, "--worktree does not apply to --sandbox.*use --clone"),
        ({"sandbox_args": {"max_concurrent": 1}}, "--sandbox-args needs --sandbox"),
        ({"sandbox": PLACE["sandbox"]}, "max_concurrent is missing"),
        ({**PLACE, "sandbox_args": {"max_concurrent": 1, "imagé": "x"}}, "'imagé' is not a setting"),
        ({"sandbox": "e2c"}, "--sandbox e2c is not a provider"),
        ({"verifier_on_host": True, "verifier": "true"}, "--verifier-on-host needs --container or --sandbox"),
    ],
)
def test_options_that_do_not_fit_are_refused_by_name(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        CommandAgent(AgentSpec("command", words=("sh",), arguments=options))


@pytest.mark.parametrize("url", ["http://127.0.0.1:8080", "http://localhost:8080", "http://[::1]:80"])
async def test_an_address_of_this_machine_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FolderSandbox, "elsewhere", True)
    refused = pytest.raises(ConfigurationError, match=r"reachable from this machine only.*--expose.*--server-url")
    with refused:  # before the first episode
        await check_agent(RunOptions(command=("sh",), agent_arg={**PLACE, "server_url": url}), Task("trees", {}))
    await check_agent(RunOptions(command=("sh",), agent_arg=PLACE), Task("trees", {}))
    agent = CommandAgent(AgentSpec("command", words=("sh",), arguments=PLACE))
    with refused:  # the address of a session
        agent.check_server(f"{url}/~secret")
    agent.check_server("https://trees.example/~secret")
