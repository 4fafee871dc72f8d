"""The reward of a command: what its verifier says, which the command cannot say in its place."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.support import let_pass, real_server, until
from tests.unit.tokengrove.rollout.command_episodes import CURL, KEY, Commands, sh
from tests.unit.tokengrove.rollout.test_command_agent import alive
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.command.reward_file import main_reward, parse_reward, read_reward
from tokengrove.rollout.episodes import AgentSpec, RewardFailed

HERE = __name__


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with real_server(tmp_path_factory.mktemp("verifier"), engine_arg=("play=babble", "tokens=4"), admin_key=KEY) as url:
        yield Commands(url)


@pytest.mark.parametrize(
    ("verifier", "reward"),
    [
        ("exit 0", 1.0),
        ("exit 1", 0.0),
        ("kill -9 $$", 0.0),
        ("echo some; echo 0.25; echo", 0.25),
        ("echo 5 passed", 1.0),
        ("echo 0.25; exit 1", 0.0),
        ('echo -2.5 > "$REWARD_FILE"; echo 7; exit 3', -2.5),
        ('echo 0.5 > "$REWARD_FILE"; echo 0.75 > "${REWARD_FILE%.txt}.json"', 0.75),
        ('test "$TOKENGROVE_TASK_ID" = trees && grep -q tree "$TOKENGROVE_TASK_FILE"', 1.0),
        ('test "$AGENT_EXIT_CODE" = 0 && grep -q "the agent says" "$AGENT_OUTPUT_FILE"', 1.0),
        ('test "$(cat left)" = "{data.prompt}"', 1.0),
        ('test "$(cat left)" = "$(cat "$TOKENGROVE_PROMPT_FILE")" && test -s left', 1.0),
    ],
)
async def test_a_verifier_says_the_reward(commands: Commands, verifier: str, reward: float) -> None:
    words = sh("echo the agent says", "cat > left")
    assert await commands.rewarded(*words, verifier=verifier) == reward


@pytest.mark.parametrize(
    "verifier",
    [
        "test {data.plain} = plain",
        'test "{data.text}" = "$(cat expected)"',
        "printf %s '{data.text}' | cmp - expected",
        'printf %s "$(printf %s "{data.text}")" | cmp - expected',
        "# it's {data.text}\nprintf %s \\'\"{data.text}\" | cut -c 2- | head -c -1 | cmp - expected",
        "cat > found <<END\n{data.text}\nEND\nhead -c -1 found | cmp - expected",
    ],
)
async def test_what_a_task_says_is_no_part_of_the_verifiers_script(commands: Commands, verifier: str) -> None:
    text = """a 'b' "c" $(touch ran) `touch ran` ; touch ran #"""
    data = {"prompt": text, "text": text, "plain": "plain"}
    words = ("sh", "-c", 'printf %s "$1" > expected', "sh", "{data.text}")
    plain = f"{verifier}; test $? = 0 && ! test -e ran"
    assert await commands.rewarded(*words, verifier=plain, data=data) == 1.0


async def test_a_field_is_a_command_where_the_verifier_runs_it_as_one(commands: Commands) -> None:
    data = {"prompt": "Name a tree.", "check": "test -e left && exit 0; exit 1"}
    assert await commands.rewarded("touch", "left", verifier='sh -c "{data.check}"', data=data) == 1.0


async def test_files_that_a_verifier_lacks_are_named(commands: Commands) -> None:
    with pytest.raises(RewardFailed, match=r"verifier.s files cannot be copied: .*/nonexistent/Name a tree\."):
        await commands.rewarded("true", verifier="true", verifier_files="/nonexistent/{data.prompt}")


async def test_named_values_are_scores_beside_the_reward(commands: Commands) -> None:
    verifier = """echo '{"reward": 0.5, "style": 2, "done": true}' > "${REWARD_FILE%.txt}.json\""""
    result = await commands.played(*sh(CURL), verifier=verifier)
    assert (result.reward, result.scores, result.failure) == (0.5, {"style": 2.0, "done": 1.0}, None)


@pytest.mark.parametrize(
    ("verifier", "message"),
    [
        ("no-such-test", "the verifier exited with 127: .*no-such-test"),
        ("echo inf", "inf is not a finite number"),
        ('echo nan > "$REWARD_FILE"', "reward.txt: nan is not a finite number"),
        ('echo well > "$REWARD_FILE"', "reward.txt: could not convert"),
        ('ln -s /etc/hostname "$REWARD_FILE"', "reward.txt is a link"),
        ('mkfifo "$REWARD_FILE"', "reward.txt is not a file"),
        ('mkdir "$REWARD_FILE"', "reward.txt is not a file"),
        ('head -c 100000 /dev/zero > "$REWARD_FILE"', "reward.txt has more than 65536 bytes"),
        ("""echo '{"a": 1, "b": 2}' > "${REWARD_FILE%.txt}.json\"""", "no value is named reward: a, b"),
        ("""echo '{"reward": "1"}' > "${REWARD_FILE%.txt}.json\"""", "reward.json: '1' is not a finite number"),
    ],
)
async def test_a_verifier_that_cannot_say_is_a_failure_of_the_reward(
    commands: Commands, verifier: str, message: str
) -> None:
    with pytest.raises(RewardFailed, match=message):
        await commands.rewarded("true", verifier=verifier)


async def test_the_result_of_an_episode_tells_whose_failure_it_was(commands: Commands) -> None:
    result = await commands.played(*sh(CURL), verifier="no-such-test")
    assert (result.failure, result.reward) == ("reward", None)


async def test_the_verifiers_files_are_not_there_before_the_command_has_ended(
    commands: Commands, tmp_path: Path
) -> None:
    hidden = tmp_path / "tests"
    hidden.mkdir()
    (hidden / "expected.txt").write_text("oak")
    looked = sh('test -z "$VERIFIER_FILES$REWARD_FILE"', "printf oak > answer", "ls -A .. > seen")
    verifier = 'cmp answer "$VERIFIER_FILES/expected.txt" && ! grep -q verifier seen && test -z "$OPENAI_API_KEY"'
    assert await commands.rewarded(*looked, verifier=verifier, verifier_files=str(hidden)) == 1.0
    assert [file.name for file in hidden.iterdir()] == ["expected.txt"]


async def test_nothing_that_a_command_leaves_behind_writes_a_reward(commands: Commands, tmp_path: Path) -> None:
    note = tmp_path / "pids"
    forge = 'while :; do for each in ../*/reward; do echo 1 > "$each/reward.txt"; done; sleep 0.01; done'
    words = sh(
        *(f"{start} sh -c {json.dumps(forge).replace('$', chr(92) + '$')} >/dev/null 2>&1 & echo $! >> {note}"
          for start in ("", "setsid", "env -i PATH=$PATH setsid")),
        "mkdir -p ../reward ../verifier; echo 1 > ../reward/reward.txt; echo 1 > reward.txt",
        'printf "#!/bin/sh\\nexit 0\\n" > ~/check; chmod +x ~/check',
    )  # fmt: skip
    verifier = "test -e ~/check && exit 0; for look in 1 2 3 4 5; do sleep 0.02; done; exit 1"
    assert await commands.rewarded(*words, verifier=verifier) == 0.0
    assert [alive(int(pid)) for pid in note.read_text().split()] == [False] * 3


@pytest.mark.parametrize("reward", [None, -1.0])
async def test_a_verifier_that_runs_too_long_fails_unless_that_has_a_reward(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reward: float | None
) -> None:
    begun = tmp_path / "begun"
    options: dict[str, Any] = {"verifier": f"touch {begun}; sleep 1000", "timeout_reward": reward}
    playing = asyncio.ensure_future(commands.rewarded("true", **options))
    await until(begun.exists)
    await let_pass(601, monkeypatch)
    if reward is None:
        with pytest.raises(RewardFailed, match="the verifier has not ended within 600 s"):
            await playing
    else:
        assert await playing == reward


async def test_a_verifier_has_variables_of_its_own(commands: Commands) -> None:
    verifier = 'test "$JUDGE-$HOME" != "-" && test "$JUDGE" = trees'
    assert await commands.rewarded("true", verifier=verifier, verifier_env={"JUDGE": "{task_id}"}) == 1.0


def all_of_it(
    *,
    task: Mapping[str, Any],
    workdir: Path,
    messages: list[Any],
    interaction_ids: list[str],
    exit_code: int,
    output: str,
    sample: int,
    unknown: str = "given",
) -> dict[str, float]:
    assert task == {"prompt": "Name a tree."}
    assert (workdir / "left").read_text() == "x\n"
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert len(interaction_ids) == 1
    assert (exit_code, output, sample, unknown) == (0, "said\n", 1, "given")
    return {"reward": 0.75, "style": 1.0}


async def coroutine(workdir: Path) -> float | None:
    await asyncio.sleep(0)
    return None if not os.listdir(workdir) else 0.5


def broken(workdir: Path) -> float:
    raise KeyError("expected")


def no_number() -> str:
    return "good"


def nameless() -> dict[str, float]:
    return {"style": 1.0, "tests": 0.5}


def scalar() -> Any:
    return numpy.float32(0.5)


async def test_a_function_may_verify_and_gets_what_it_asks_for(commands: Commands) -> None:
    words = sh(f"({CURL}) > /dev/null".replace("\n)", ")"), "echo said; echo x > left")
    result = await commands.played(*words, verifier_function=f"{HERE}:all_of_it")
    assert (result.failure, result.message, result.reward) == (None, None, 0.75)
    assert result.scores == {"style": 1.0}
    assert await commands.rewarded("touch", "x", verifier_function=f"{HERE}:coroutine") == 0.5
    assert await commands.rewarded("true", verifier_function=f"{HERE}:coroutine") is None
    assert await commands.rewarded("true", verifier_function=f"{HERE}:scalar") == 0.5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "broken: KeyError: 'expected'"),
        ("no_number", "returned 'good' of type str; return a number"),
        ("nameless", "returned style, tests, and none of them is named reward"),
    ],
)
async def test_a_function_that_fails_is_a_failure_of_the_reward(commands: Commands, name: str, message: str) -> None:
    with pytest.raises(RewardFailed, match=message):
        await commands.rewarded("true", verifier_function=f"{HERE}:{name}")


def asks_too_much(task: Mapping[str, Any], secret: str) -> float:
    return 0.0


@pytest.mark.parametrize(
    ("path", "message"),
    [(f"{HERE}:asks_too_much", "parameter 'secret', which is none of task"), (f"{HERE}:HERE", "is not a function")],
)
def test_a_function_that_cannot_be_called_is_refused_before_the_run(path: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        CommandAgent(AgentSpec("command", words=("true",), arguments={"verifier_function": path}))


def test_the_main_reward_is_the_one_of_that_name_or_the_only_one(tmp_path: Path) -> None:
    assert read_reward(tmp_path) is None
    assert main_reward(parse_reward("reward.json", b'{"accuracy": 0.5}')) == 0.5
    assert main_reward(parse_reward("reward.json", b'{"accuracy": 0.5, "reward": 1}')) == 1.0
    with pytest.raises(ValueError, match="there are none"):
        main_reward(parse_reward("reward.json", b"{}"))
    with pytest.raises(ValueError, match=r"reward\.json"):
        parse_reward("reward.json", b"[" * 100_000)
    with pytest.raises(ValueError, match="not a finite number"):
        parse_reward("reward.json", b"1" + b"0" * 400)
