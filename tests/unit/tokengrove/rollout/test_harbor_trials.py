"""Trials of Harbor tasks: what the tests say counts, whatever the agent has left or tried."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.tokengrove.rollout.harbor_rooms import room, rooms, shell, tried
from tests.unit.tokengrove.rollout.harbor_tasks import task, write
from tokengrove.rollout.episodes import EpisodeEnded, RewardFailed
from tokengrove.rollout.harbor import BadTask, Stage
from tokengrove.rollout.harbor.harbor_sandbox import HarborSandbox
from tokengrove.rollout.harbor.task_config import Healthcheck
from tokengrove.rollout.harbor.trial import _means, healthy

__all__ = ["rooms"]
pytestmark = pytest.mark.usefixtures("rooms")
NOTHING = shell("true")


@pytest.mark.parametrize(("word", "reward"), [("right", 1.0), ("wrong", 0.0)])
async def test_the_tests_give_the_reward(tmp_path: Path, word: str, reward: float) -> None:
    assert await tried(task(tmp_path / "one"), shell(f"echo {word} > answer.txt")) == {"reward": reward}


async def test_several_rewards_come_from_json_before_text(tmp_path: Path) -> None:
    tests = 'cd /logs/verifier; echo 7 > reward.txt; echo \'{"reward": 0.5, "style": 2}\' > reward.json'
    assert await tried(task(tmp_path / "one", files={"tests/test.sh": tests}), shell("true")) == {
        "reward": 0.5,
        "style": 2.0,
    }


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        (
            "echo the end is near; exit 3",
            "exited with 3, wrote neither .*reward.txt nor .*reward.json: the end is near",
        ),
        ("> /logs/verifier/reward.txt", "reward.txt"),
        ("echo nan > /logs/verifier/reward.txt", "finite"),
        ('echo \'{"reward": "1"}\' > /logs/verifier/reward.json', "'1' is not a finite number"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "wrote neither"),
        ("echo slow; sleep 100", "have not ended within 0.5 s: slow"),
    ],
)
async def test_without_a_reward_the_trial_has_failed(tmp_path: Path, tests: str, told: str) -> None:
    folder = task(tmp_path / "one", "[verifier]\ntimeout_sec = 0.5", {"tests/test.sh": tests})
    with pytest.raises(RewardFailed, match=told):
        await tried(folder, shell("true"))


async def test_an_agent_can_neither_see_nor_replace_tests_and_reward(tmp_path: Path) -> None:
    tests = "ls -A /tests | grep -v '^test.sh$' && exit 1; ls -A /logs/verifier | grep -v stdout && exit 1; exit 2"
    folder = task(tmp_path / "one", files={"tests/test.sh": tests})
    sees = f'! ls {folder}/tests; ! ls /solution; test -z "$(ls -A /tests)"'
    fakes = "echo 1 > /logs/verifier/reward.txt; echo 'exit 0' > /tests/conftest.py; chmod 555 /tests"
    with pytest.raises(RewardFailed, match="exited with 2"):
        await tried(folder, shell(f"({sees}) 2>&1 && {fakes}"))


async def test_what_the_agent_left_running_is_there_for_the_tests_and_gone_afterwards(tmp_path: Path) -> None:
    mark = f"left-{os.getpid()}"
    tests = (
        f"pgrep -f '[l]eft-{os.getpid()}' && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
    )
    config = "[verifier]\nenv = {REWARD = '/logs/verifier/reward.txt'}"
    folder = task(tmp_path / "one", config, {"tests/test.sh": tests})
    leaves = f"env -i setsid sh -c 'sleep 1000; : {mark}' > /dev/null 2>&1 &"
    assert await tried(folder, shell(leaves)) == {"reward": 1.0}
    assert await tried(folder, shell(leaves), kill_before_tests=True) == {"reward": 0.0}
    assert mark.encode() not in b"".join(_command_lines())


def _command_lines() -> list[bytes]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.append(Path("/proc", pid, "cmdline").read_bytes())
        except OSError:
            continue
    return found


async def test_as_in_harbor_the_tests_judge_an_agent_that_did_not_end_well_unless_strict(tmp_path: Path) -> None:
    folder = task(tmp_path / "one")

    async def too_long(stage: Stage, sandbox: HarborSandbox, limit_s: float | None) -> EpisodeEnded:
        await sandbox.run("echo right > answer.txt")
        return EpisodeEnded("Timeout", "too long")

    assert await tried(folder, too_long) == {"reward": 1.0}
    with pytest.raises(EpisodeEnded, match="too long"):
        await tried(folder, too_long, strict=True)


async def test_variables_are_those_of_the_task_and_of_the_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_CALLER", "theirs")
    monkeypatch.setenv("SECRET_KEY", "secret")
    config = '[environment]\nenv = {A = "${OF_THE_CALLER}"}\n[verifier]\nenv = {B = "${ABSENT:-b}"}'
    tests = 'test "$A$B$SECRET_KEY" = theirsb && echo 1 > /logs/verifier/reward.txt'
    folder = task(tmp_path / "one", config, {"tests/test.sh": tests})
    assert await tried(folder, shell('test "$A$B$SECRET_KEY" = theirs')) == {"reward": 1.0}
    missing = task(tmp_path / "two", '[environment]\nenv = {A = "${ABSENT}"}')
    with pytest.raises(BadTask, match="the variable ABSENT is not set"):
        await tried(missing, shell("true"))


STEPS = """
{strategy}
[[steps]]
name = "one"
min_reward = {least}
[[steps]]
name = "two"
"""
TWO = {
    "steps/one/instruction.md": "One.",
    "steps/one/tests/test.sh": "cat /app/first > /logs/verifier/reward.txt",
    "steps/one/tests/secret": "s",
    "steps/two/instruction.md": "Two.",
    "steps/two/tests/test.sh": "cat /app/second > /logs/verifier/reward.txt",
    "steps/two/workdir/setup.sh": "echo 0.5 > second; test ! -e /tests/secret && ! ls /logs/verifier/*",
}


@pytest.mark.parametrize(
    ("strategy", "least", "reward"),
    [("", "0.9", 0.75), ("multi_step_reward_strategy = 'final'", "0.9", 0.5), ("", "1.1", 1.0)],
)
async def test_steps_follow_each_other_in_one_environment(
    tmp_path: Path, strategy: str, least: str, reward: float
) -> None:
    folder = task(tmp_path / "one", STEPS.format(strategy=strategy, least=least), TWO)
    assert await tried(folder, shell("echo 1 > first", "test -e first")) == {"reward": reward}


async def test_a_step_whose_setup_fails_fails_the_trial(tmp_path: Path) -> None:
    files = {**TWO, "steps/two/workdir/setup.sh": "echo no >&2; exit 4"}
    folder = task(tmp_path / "one", STEPS.format(strategy="", least="0"), files)
    with pytest.raises(BadTask, match=r"setup.sh exited with 4: no"):
        await tried(folder, shell("echo 1 > first"))


async def test_a_separate_verifier_sees_the_artifacts_and_nothing_else(tmp_path: Path) -> None:
    config = 'artifacts = ["/app/out", "/app/absent"]\n[verifier]\nenvironment_mode = "separate"'
    tests = "ls /own /app/out/* && test ! -e /app/other && cat /app/out/a > /logs/verifier/reward.txt"
    files = {
        "tests/Dockerfile": "FROM scratch\nCOPY . /tests/\nCOPY own /own\n",
        "tests/own": "",
        "tests/test.sh": tests,
    }
    folder = task(tmp_path / "one", config, files)
    agent = "mkdir out; echo 0.25 > out/a; touch other; ! ls /own"
    assert await tried(folder, shell(agent)) == {"reward": 0.25}


async def test_a_separate_verifier_without_a_build_of_its_own_gets_a_fresh_environment(tmp_path: Path) -> None:
    config = 'artifacts = ["/app/answer.txt"]\n[verifier]\nenvironment_mode = "separate"'
    folder = task(
        tmp_path / "one", config, {"tests/test.sh": "test ! -e /app/other && echo 1 > /logs/verifier/reward.txt"}
    )
    assert await tried(folder, shell("touch other")) == {"reward": 1.0}


async def test_outputs_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    config = 'artifacts = [{source = "/app/a.txt", destination = "named"}, "/app/dir"]'
    folder, kept = task(tmp_path / "one", config), tmp_path / "kept"
    agent = "echo a > a.txt; mkdir dir; echo b > dir/b; ln -s /etc/passwd dir/link; echo log > /logs/agent/log"
    await tried(folder, shell(agent), keep_output=str(kept))
    files = {str(each.relative_to(kept / "trial")): each for each in kept.rglob("*") if each.is_file()}
    assert set(files) == {
        *("agent/log", "artifacts/named", "artifacts/app/dir/b"),
        *("verifier/reward.txt", "verifier/test-stdout.txt"),
    }
    assert files["artifacts/named"].read_text() == "a\n"


async def test_a_reward_that_an_earlier_trial_has_left_in_the_kept_output_does_not_count(tmp_path: Path) -> None:
    write(tmp_path / "kept" / "trial" / "verifier", {"reward.json": "1"})
    folder = task(tmp_path / "one", files={"tests/test.sh": "echo 0.25 > /logs/verifier/reward.txt"})
    assert await tried(folder, shell("true"), keep_output=str(tmp_path / "kept")) == {"reward": 0.25}


async def test_tests_that_remove_the_place_of_their_reward_are_to_blame(tmp_path: Path) -> None:
    folder = task(tmp_path / "one", files={"tests/test.sh": "rm -r /logs/verifier"})
    with pytest.raises(RewardFailed, match="the output of the tests cannot be read: /logs/verifier"):
        await tried(folder, shell("true"))


async def test_a_healthcheck_is_tried_again_before_it_fails(tmp_path: Path) -> None:
    async def at_once(_: float) -> None: ...

    place = room(tmp_path)
    await place.start()
    try:
        counting = "echo x >> /count; test $(wc -l < /count) -ge 3"
        await healthy(place, Healthcheck(command=counting, retries=3), at_once)
        assert (await place.run("wc -l < /count")).output.strip() == "3"
        with pytest.raises(BadTask, match="has failed 2 times"):
            await healthy(place, Healthcheck(command="false", retries=2), at_once)
    finally:
        await place.stop()


def test_a_value_that_a_step_lacks_counts_as_0_in_the_mean_of_the_steps() -> None:
    assert _means([{"reward": 1.0, "style": 1.0}, {"reward": 0.5}]) == {"reward": 0.75, "style": 0.5}
