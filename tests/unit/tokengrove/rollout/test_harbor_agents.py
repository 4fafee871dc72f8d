"""Agents of runs that play Harbor tasks: their rewards, what they see, and what is refused before an episode."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server
from tests.unit.tokengrove.rollout.command_episodes import CURL as TURN
from tests.unit.tokengrove.rollout.command_episodes import KEY
from tests.unit.tokengrove.rollout.harbor_rooms import rooms, shell, tried
from tests.unit.tokengrove.rollout.harbor_tasks import task
from tokengrove.commands.harbor import harbor
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task, play, resolve_agent
from tokengrove.rollout.harbor import BadTask, HarborAgent, TaskFolder, agent_spec, tasks, unmet
from tokengrove.rollout.harbor.harbor_sandbox import HarborSandbox

__all__ = ["rooms"]
in_rooms = pytest.mark.usefixtures("rooms")
CURL = TURN.strip()
HERE = "tests.unit.tokengrove.rollout.test_harbor_agents"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("harbor")
    with real_server(folder, engine_arg=("play=babble", "tokens=4"), admin_key=KEY, require_key=True) as url:
        yield url


async def played(url: str, folder: Path, spec: AgentSpec) -> EpisodeResult:
    spec = agent_spec(spec)
    plan = EpisodePlan(tasks(folder)[0], 0, 0, Server(url, KEY), spec, f"harbor-{next(_numbers)}")
    return await play(plan, resolve_agent(spec))


def command(script: str, **options: Any) -> AgentSpec:
    return AgentSpec("command", words=("sh", "-c", script), arguments=options)


REWARDS = """
grep -q right answer.txt && ! env | grep API_KEY && echo '{"reward": 0.5, "style": 2}' > /logs/verifier/reward.json
"""


@in_rooms
async def test_a_command_plays_in_the_environment_of_its_task(url: str, tmp_path: Path) -> None:
    folder = task(tmp_path / "one", files={"tests/test.sh": REWARDS, "instruction.md": "Say {model} twice.\n"})
    script = (
        f"{CURL} > reply && cat > prompt && pwd && cat prompt && echo $TOKENGROVE_TASK_ID $0 && echo right > answer.txt"
    )
    result = await played(url, folder, command(script, keep_output=str(tmp_path / "kept")))
    assert (result.failure, result.message, result.reward, result.scores) == (None, None, 0.5, {"style": 2.0})
    assert result.turns == 1 and result.output_tokens > 0
    log = (tmp_path / "kept" / result.session_id / "command.log").read_text()
    assert log.splitlines()[-3:] == ["/app", "Say {model} twice.", "one sh"]


@in_rooms
async def test_the_prompt_of_each_step_is_its_instruction(url: str, tmp_path: Path) -> None:
    tests = 'grep -qx "$WORD." /app/prompt && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt'
    files = {f"steps/{name}/instruction.md": f"{name}." for name in ("one", "two")}
    steps = "".join(
        f"[[steps]]\nname = '{name}'\nverifier = {{env = {{WORD = '{name}'}}}}\n" for name in ("one", "two")
    )
    folder = task(tmp_path / "one", steps, {**files, "tests/test.sh": tests})
    spec = AgentSpec("command", words=("sh", "-c", f'{CURL}; printf %s "$0" > prompt', "{prompt}"))
    result = await played(url, folder, spec)
    assert (result.failure, result.reward, result.turns) == (None, 1.0, 2)


@in_rooms
@pytest.mark.parametrize(
    ("script", "options", "expected"),
    [
        ("echo right > answer.txt; exit 3", {}, (None, 1.0)),
        ("echo right > answer.txt; exit 3", {"strict": True}, ("agent", None)),
        ("echo right > answer.txt; sleep 100", {}, (None, 1.0)),
        ("echo right > answer.txt; sleep 100", {"strict": True}, ("timeout", None)),
    ],
)
async def test_an_agent_that_does_not_end_well_is_judged_or_fails(
    url: str, tmp_path: Path, script: str, options: dict[str, bool], expected: tuple[str | None, float | None]
) -> None:
    folder = task(tmp_path / "one", "[agent]\ntimeout_sec = 2")
    result = await played(url, folder, command(f"{CURL}; {script}", **options))
    assert (result.failure, result.reward) == expected


async def works(instruction: str, sandbox: HarborSandbox, session: Any, step: str | None, word: str = "right") -> None:
    """An agent that is a coroutine function."""
    assert instruction == "Write the word.\n" and step is None
    body = {"model": "any", "max_tokens": 2, "messages": [{"role": "user", "content": instruction}]}
    words = ["curl", "-s", f"{session.base_url}/chat/completions", "-H", f"authorization: Bearer {session.api_key}"]
    told = await sandbox.run([*words, "-H", "content-type: application/json", "-d", json.dumps(body)])
    assert told.exit_code == 0, told.output
    await sandbox.upload("answer.txt", f"{word}\n".encode())


@in_rooms
@pytest.mark.parametrize(("arguments", "reward"), [({}, 1.0), ({"word": "other"}, 0.0)])
async def test_a_coroutine_function_works_through_the_sandbox(
    url: str, tmp_path: Path, arguments: dict[str, str], reward: float
) -> None:
    result = await played(url, task(tmp_path / "one"), AgentSpec("path", f"{HERE}:works", arguments=arguments))
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, reward, 1)


@in_rooms
async def test_tests_without_a_reward_are_a_failure_of_the_reward(url: str, tmp_path: Path) -> None:
    folder = task(tmp_path / "one", files={"tests/test.sh": "echo the disk is full; exit 1"})
    result = await played(url, folder, command(CURL))
    assert (result.failure, result.reward) == ("reward", None)
    assert "exited with 1" in str(result.message) and "the disk is full" in str(result.message)


@in_rooms
async def test_of_several_rewards_one_is_named(url: str, tmp_path: Path) -> None:
    tests = 'echo \'{"speed": 1, "style": 2}\' > /logs/verifier/reward.json'
    folder = task(tmp_path / "one", files={"tests/test.sh": tests})
    result = await played(url, folder, command(CURL))
    assert result.failure == "reward" and "none of the rewards speed, style is 'reward'" in str(result.message)
    result = await played(url, folder, command(CURL, reward_key="style"))
    assert (result.failure, result.reward, result.scores) == (None, 2.0, {"speed": 1.0})


def synchronous(sandbox: HarborSandbox) -> None: ...


@pytest.mark.parametrize(
    ("agent", "options", "told"),
    [
        (["x"], {"sandbax": "room"}, "--sandbax is not an option for Harbor tasks; known: sandbox"),
        (["x"], {"sandbox": "vm"}, "--sandbox must be one of room, docker, podman, not 'vm'"),
        (["x"], {"copy": "/tmp"}, "--copy does not apply to Harbor tasks"),
        (["x"], {"dockerfile_run": "never"}, "--dockerfile-run must be one of"),
        (["x"], {"timeout_multiplier": 0}, "--timeout-multiplier must be more than 0"),
        (["x"], {"sandbox_args": ["--privileged"]}, "--sandbox-args applies to"),
        (["x", "{promt}"], {}, "did you mean {prompt}"),
        ([], {}, "there is no agent for Harbor tasks"),
        ("oracle", {}, "run `tokengrove harbor`"),
        (f"{HERE}:synchronous", {}, "use a command, or a coroutine function"),
        (f"{HERE}:works", {"speed": 1}, "takes no argument 'speed'"),
    ],
)
def test_what_cannot_be_is_refused_before_any_episode(agent: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigurationError, InvalidRequest)) as raised:
        HarborAgent(agent, **options)
    assert told in str(raised.value)


async def test_a_task_of_other_data_is_told_apart(url: str) -> None:
    spec = agent_spec(AgentSpec("command", words=("true",)))
    plan = EpisodePlan(Task("t", {"prompt": "x"}), 0, 0, Server(url, KEY), spec, "harbor-other")
    result = await play(plan, resolve_agent(spec))
    assert result.failure == "agent" and "'t' is not a Harbor task" in str(result.message)


@pytest.mark.parametrize(
    ("config", "name", "told"),
    [
        ("[environment]\ngpus = 1", "gpus", "gpus = 1"),
        ("[environment]\nmcp_servers = [{name = 'a', url = 'b'}]", "mcp_servers", "they are not passed to the agent"),
        ("artifacts = [{source = '/x', service = 'db'}]", "artifacts.service", "only one container is run"),
        ("[environment]\nos = 'windows'", "os", "need Windows"),
    ],
)
def test_what_would_make_results_wrong_is_refused_unless_it_is_accepted(
    tmp_path: Path, config: str, name: str, told: str
) -> None:
    read = TaskFolder(task(tmp_path / "one", config))
    with pytest.raises(BadTask, match=told) as raised:
        unmet.check(read, image=False, accepted=())
    assert f"accept={name}" in str(raised.value)
    unmet.check(read, image=False, accepted=[name])


@in_rooms
async def test_an_image_without_a_dockerfile_is_refused_where_there_are_no_images(tmp_path: Path) -> None:
    folder = task(tmp_path / "one", "[environment]\ndocker_image = 'org/image'")
    assert await tried(folder, shell("echo right > answer.txt")) == {"reward": 1.0}  # its Dockerfile says the same
    (folder / "environment" / "Dockerfile").unlink()
    with pytest.raises(BadTask, match=r"the content of the image is missing.*sandbox=docker.*accept=docker_image"):
        await tried(folder, shell("true"))
    agent = "mkdir /app && echo right > /app/answer.txt"
    assert await tried(folder, shell(agent), accept="docker_image,gpus") == {"reward": 1.0}


def test_what_only_differs_is_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unmet, "_said", set())
    config = "[environment]\ncpus = 2\nmemory_mb = 1\nnetwork_mode = 'no-network'\n[agent]\nuser = 'u'\ntimeout = 1"
    read = TaskFolder(task(tmp_path / "one", config, {"environment/Dockerfile": "FROM a:1\nUSER b\nENTRYPOINT c\n"}))
    with caplog.at_level(logging.WARNING):
        unmet.check(read, image=False, accepted=())
        unmet.check(read, image=False, accepted=())
    told = [record.getMessage() for record in caplog.records]
    names = ("cpus", "memory_mb", "no-network", "agent.timeout", "image a:1", "not as b", "ENTRYPOINT", "one user:")
    assert all(sum(name in text for text in told) == 1 for name in names[:-1]) and len(told) == 8


@in_rooms
def test_the_solutions_of_all_tasks_are_tried_without_a_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task(tmp_path / "good")
    task(tmp_path / "weak", files={"solution/solve.sh": "echo no right word >&2; exit 3"})
    task(tmp_path / "broken", files={"tests/test.sh": "true"})
    with pytest.raises(SystemExit, match="1"):
        harbor(tmp_path)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "1 of 3 tasks with a reward of 1"
    assert sorted(line.split("(")[0] for line in lines) == ["failed broken ", "failed weak ", "ok     good "]
    assert any("the solution exited with 3: no right word" in line for line in lines)
    with pytest.raises(SystemExit, match="1"):
        harbor(tmp_path, agent="nop", as_json=True, limit=2)
    told = {each["task_id"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert told["good"]["rewards"] == {"reward": 0.0} and "wrote neither" in told["broken"]["problem"]
    harbor(tmp_path / "good", option=["dockerfile-run=skip"])
    assert "ok     good" in capsys.readouterr().out


@in_rooms
async def test_a_command_that_cannot_work_tells_why_it_had_no_turn(url: str, tmp_path: Path) -> None:
    result = await played(url, task(tmp_path / "one"), command("echo there is no such file >&2; exit 2"))
    assert result.failure == "no_data"
    assert "without a complete turn: the command exited with 2: there is no such file" in str(result.message)
