"""A command as an agent: what it sees, how it ends, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import let_pass, real_server, until
from tests.unit.tokengrove.rollout.command_episodes import CURL, KEY, Commands, python, sh
from tokengrove.client import AsyncClient
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.episodes import AgentSpec, EpisodeEnded, play

OPENAI_AGENT = """
from openai import OpenAI

agent = OpenAI()
messages = [{"role": "user", "content": input()}]
for _ in range(2):
    reply = agent.chat.completions.create(model="any", messages=messages, max_tokens=4)
    messages += [reply.choices[0].message, {"role": "user", "content": "Another."}]
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with real_server(
        tmp_path_factory.mktemp("commands"), engine_arg=("play=babble", "tokens=4"), admin_key=KEY, require_key=True
    ) as url:
        yield Commands(url)


@pytest.mark.parametrize(("words", "turns"), [(python(OPENAI_AGENT), 2), (sh(CURL), 1)], ids=["openai", "curl"])
async def test_an_unmodified_agent_is_exported_as_what_the_model_sampled(
    commands: Commands, words: tuple[str, ...], turns: int
) -> None:
    result = await commands.played(*words, verifier="exit 0")
    assert (result.failure, result.message, result.turns, result.reward) == (None, None, turns, 1.0)
    async with AsyncClient(commands.url, KEY) as client:
        tree = await client.session_tree(result.session_id)
        export = await client.export(session_id=result.session_id, layout="concat")
        shown = [await client.show_turn(result.session_id, node.id, ["ids"]) for node in tree.interactions]
    assert tree.outcome == "Finished"
    assert export.sessions[result.session_id]["metrics"]["exit_code"] == 0
    (sample,) = export.samples
    assert list(sample.interaction_ids) == [node.id for node in tree.interactions]
    trained = sample.input_ids[sample.loss_mask.astype(bool)].tolist()
    assert trained == [token for turn in shown for token in turn["output_ids"]]
    assert len(trained) == sum(node.output_tokens for node in tree.interactions) > 0


async def test_a_command_sees_its_session_and_no_secret_of_its_caller(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_TOKEN_OF_THE_CALLER", "secret-1")
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "secret-2")
    monkeypatch.setenv("OPENAI_API_KEY", "secret-3")
    monkeypatch.setenv("GOOGLE_API_KEY", "secret-4")
    monkeypatch.setenv("TOKENGROVE_ADMIN_KEY", KEY)
    printed = await commands.printed("env; pwd", tmp_path, model="m7")
    seen = dict(line.split("=", 1) for line in printed.splitlines() if "=" in line)
    assert "secret-" not in printed
    assert KEY not in printed
    root = seen["ANTHROPIC_BASE_URL"]
    assert root.startswith(commands.url)
    assert seen["OPENAI_BASE_URL"] == seen["OPENAI_API_BASE"] == seen["TOKENGROVE_BASE_URL"] == f"{root}/v1"
    assert seen["OPENAI_API_KEY"] == seen["ANTHROPIC_API_KEY"] == seen["TOKENGROVE_API_KEY"]
    assert (seen["GOOGLE_GEMINI_BASE_URL"], seen["GEMINI_API_KEY"]) == (root, seen["OPENAI_API_KEY"])
    assert (seen["TOKENGROVE_TASK_ID"], seen["TOKENGROVE_MODEL"], seen["TOKENGROVE_SEED"]) == ("trees", "m7", "7")
    opencode = json.loads(seen["OPENCODE_CONFIG_CONTENT"])["provider"]["tokengrove"]
    assert opencode["options"] == {"baseURL": f"{root}/v1", "apiKey": seen["OPENAI_API_KEY"]}
    assert seen["HOME"] != os.environ["HOME"]
    assert seen["PATH"] == os.environ["PATH"]
    assert not exists(seen["HOME"])


async def test_variables_are_passed_by_name_and_by_pattern(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CLOUD_ZONE", "CLOUD_KEY", "ONE", "ANOTHER"):
        monkeypatch.setenv(name, name.lower())
    printed = await commands.printed(
        "env", tmp_path, pass_env=["CLOUD_*", "ONE"], env={"MINE": "{task_id}-{data.prompt}", "NUMBER": 3}
    )
    lines = printed.splitlines()
    assert {"CLOUD_ZONE=cloud_zone", "CLOUD_KEY=cloud_key", "ONE=one", "MINE=trees-Name a tree.", "NUMBER=3"} < {*lines}
    assert "another" not in printed


async def test_programs_that_choose_a_version_find_it_in_the_callers_home(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".pyenv").mkdir()
    (tmp_path / "nvm").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PYENV_ROOT", raising=False)
    monkeypatch.setenv("NVM_DIR", str(tmp_path / "nvm"))
    monkeypatch.delenv("VOLTA_HOME", raising=False)
    verifier = f'test "$PYENV_ROOT" = {tmp_path}/.pyenv; echo $?'
    printed = await commands.printed('echo "$PYENV_ROOT $NVM_DIR $VOLTA_HOME"', tmp_path, verifier=verifier)
    assert printed == f"{tmp_path}/.pyenv {tmp_path}/nvm \n0\n"


async def test_placeholders_stand_for_values_of_the_episode_and_other_braces_stay(
    commands: Commands, tmp_path: Path
) -> None:
    data = {"question": "Why?", "deep": {"list": [1, {"x": "y"}]}, "a.b": True}
    words = ("sh", "-c", 'printf "%s\\n" "$@"', "sh")
    given = (
        "{prompt}",
        "<{data.deep.list.1.x}>",
        "{data.deep.list}",
        "{data.a.b}",
        "{print $1}{}",
        "{model}",
        "{sample}",
    )
    plan = commands.plan(*words, *given, data=data, keep_output=str(tmp_path))
    async with commands.episode(plan) as episode:
        await CommandAgent(plan.agent).play(episode)
    printed = (tmp_path / f"{plan.session_id}.log").read_text().splitlines()
    assert printed == ["Why?", "<y>", '[1, {"x": "y"}]', "true", "{print $1}{}", "tokengrove", "1"]


async def test_a_field_that_the_task_lacks_is_named(commands: Commands) -> None:
    with pytest.raises(InvalidRequest, match=r"task 'trees' has no field 'file'.*it has prompt"):
        await commands.rewarded("true", "{data.file}")
    with pytest.raises(InvalidRequest, match=r"has no text for \{prompt\}.*--prompt"):
        await commands.rewarded("true", "{prompt}", data={"x": 1})


@pytest.mark.parametrize(
    ("options", "words", "read"),
    [
        ({}, (), "Name a tree."),
        ({}, ("{prompt}",), ""),
        ({"prompt": "Say {data.prompt}"}, (), "Say Name a tree."),
        ({"stdin": "task"}, (), '{"prompt": "Name a tree."}'),
        ({"stdin": "none"}, (), ""),
        ({"stdin": "prompt"}, ("{prompt}",), "Name a tree."),
    ],
)
async def test_the_task_is_on_stdin_unless_it_is_in_the_words(
    commands: Commands, tmp_path: Path, options: dict[str, str], words: tuple[str, ...], read: str
) -> None:
    plan = commands.plan("sh", "-c", "cat", "sh", *words, keep_output=str(tmp_path), **options)
    async with commands.episode(plan) as episode:
        await CommandAgent(plan.agent).play(episode)
    assert (tmp_path / f"{plan.session_id}.log").read_text() == read


async def test_the_task_and_its_prompt_are_files_too(commands: Commands, tmp_path: Path) -> None:
    printed = await commands.printed('cat "$TOKENGROVE_PROMPT_FILE" "$TOKENGROVE_TASK_FILE"', tmp_path)
    assert printed == 'Name a tree.{"prompt": "Name a tree."}'


async def test_a_command_that_fails_is_a_failure_of_the_agent_with_the_end_of_its_output(commands: Commands) -> None:
    result = await commands.played(*sh(CURL, "echo it is broken", "exit 3"), verifier="exit 0")
    assert (result.failure, result.reward) == ("agent", None)
    assert result.message is not None
    assert result.message.startswith("the command exited with 3: ")
    assert result.message.endswith("it is broken")


@pytest.mark.parametrize("allowed", [{"exit_codes": [0, 3]}, {"any_exit_code": True}])
async def test_an_exit_code_may_be_allowed(commands: Commands, allowed: dict[str, object]) -> None:
    assert await commands.rewarded(*sh("exit 3"), verifier='exit "$((AGENT_EXIT_CODE - 3))"', **allowed) == 1.0


async def test_a_time_limit_kills_all_that_a_command_has_started(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "pids"
    started = ["sleep 1000", "setsid sleep 1000", "env -i sleep 1000", "cd /; sleep 1000"]
    script = [f"({each}) & echo $! >> {note}.new" for each in started]
    plan = commands.plan(*sh(*script, f"mv {note}.new {note}", "sleep 1000"), command_timeout_s=900, verifier="exit 0")
    playing = asyncio.ensure_future(play(plan, CommandAgent(plan.agent)))
    await until(note.exists)
    await let_pass(901, monkeypatch)
    result = await playing
    assert (result.failure, result.reward) == ("timeout", None)
    assert result.message == "the command has not ended within 900 s"
    assert [alive(int(pid)) for pid in note.read_text().split()] == [False] * len(started)


async def test_a_command_that_ran_too_long_may_be_verified(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = sh("echo done > result", f"touch {tmp_path}/begun", "sleep 1000")
    options = {"command_timeout_s": 900, "verify_timed_out": True, "verifier": "test -e result"}
    playing = asyncio.ensure_future(commands.rewarded(*words, **options))
    await until((tmp_path / "begun").exists)
    await let_pass(901, monkeypatch)
    assert await playing == 1.0


async def test_an_episode_that_is_cancelled_leaves_neither_process_nor_folder(
    commands: Commands, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    plan = commands.plan(*sh(f'setsid sleep 1000 & echo "$! $PWD" > {note}.new; mv {note}.new {note}', "sleep 1000"))
    playing = asyncio.ensure_future(play(plan, CommandAgent(plan.agent)))
    await until(note.exists)
    pid, folder = note.read_text().split()
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not alive(int(pid))
    assert not exists(folder)


async def test_all_output_of_a_command_and_its_verifier_is_kept(commands: Commands, tmp_path: Path) -> None:
    words = python("import sys; print('x' * 400_000); print('to stderr', file=sys.stderr)")
    plan = commands.plan(*words, verifier="echo checked; exit 0", keep_output=str(tmp_path / "new" / "folder"))
    async with commands.episode(plan) as episode:
        await CommandAgent(plan.agent).play(episode)
    text = (tmp_path / "new" / "folder" / f"{plan.session_id}.log").read_text()
    assert text.count("x") == 400_000
    assert text.endswith("checked\n")
    assert "to stderr" in text


async def test_a_server_in_this_process_is_refused(commands: Commands) -> None:
    async with AsyncClient(app=object()) as inside:
        plan = commands.plan("true")
        async with commands.episode(plan) as episode:
            unreachable = type(episode)(plan, episode.session, inside)
            with pytest.raises(InvalidRequest, match="start `tokengrove serve`"):
                await CommandAgent(plan.agent).play(unreachable)


async def test_a_program_that_cannot_be_started_fails_the_episode(commands: Commands) -> None:
    with pytest.raises(EpisodeEnded, match=r"cannot be started: .*no-such-agent"):
        await commands.rewarded("./no-such-agent")
    with pytest.raises(EpisodeEnded, match="cannot be started"):
        await commands.rewarded("true", "{prompt}", data={"prompt": "long " * 100_000})


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        ((), {}, "there is no command: give one after --"),
        (("no-such-agent",), {}, "there is no program 'no-such-agent' on PATH"),
        (("true", "{promt}"), {}, r"\{promt\} is not a placeholder; did you mean \{prompt\}\?"),
        (("true",), {"env": {"A": "{base_ulr}"}}, r"--env: \{base_ulr\} is not a placeholder"),
        (("true",), {"verifer": "true"}, "--verifer is not an option of a command; known: verifier"),
        (("true",), {"copy": "/no/such"}, "--copy /no/such is not a folder"),
        (("true",), {"copy": "/", "clone": "/"}, "give only one of --copy, --clone"),
        (("true",), {"commit": "HEAD"}, "--commit needs --worktree or --clone"),
        (("true",), {"verifier_files": "/"}, "--verifier-files needs --verifier"),
        (("true",), {"verifier": "true", "verifier_function": "a:b"}, "not both"),
        (("true",), {"verifier_on_host": True}, "--verifier-on-host needs --container"),
        (("true",), {"command_timeout_s": 0}, "--command-timeout-s must be more than 0"),
        (("true",), {"command_timeout_s": "1"}, "--command-timeout-s must be a number"),
        (("true",), {"command_timeout_s": float("nan")}, "--command-timeout-s must be a finite number"),
        (("true",), {"any_exit_code": "yes"}, "--any-exit-code must be true or false"),
        (("true",), {"exit_codes": ["a"]}, "--exit-codes must be a list, each an integer"),
        (("true",), {"server_url": "host:8080"}, "--server-url must begin with http:// or https://"),
        (("true",), {"env": "A=B"}, "--env must be a mapping"),
        (("true",), {"stdin": "file"}, "--stdin must be one of prompt, task, none"),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(
    words: tuple[str, ...], options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CommandAgent(AgentSpec("command", words=words, arguments=options))


def alive(pid: int) -> bool:
    """Whether a process runs: one that was killed may still wait for its parent to see it."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def exists(path: str) -> bool:
    return Path(path).exists()
