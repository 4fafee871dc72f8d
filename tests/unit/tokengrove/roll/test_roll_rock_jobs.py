"""Jobs in sandboxes on this machine: what runs, what it sees, how it is scored, and that nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import until
from tokengrove.errors import InvalidRequest
from tokengrove.roll.rock import CommandSandbox, Job, JobConfig, JobResult, LocalProcessSandbox

LINGERING = """
(setsid sleep 600 >/dev/null 2>&1 & echo $! >> pids)
(nohup sleep 600 & echo $! >> pids)
mkdir ro; touch ro/file; chmod 500 ro
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def is_gone(folder: str) -> bool:
    return not Path(folder).exists()


def run(agent: dict[str, Any], verifier: dict[str, Any] | None = None, **more: Any) -> JobResult:
    """Run a job whose sandbox is gone afterwards."""

    async def steps() -> JobResult:
        job = Job(JobConfig({"agents": [agent], "verifier": verifier or {}, "job_name": "j", **more}))
        await job.submit()
        try:
            return await job.wait()
        finally:
            folder = job.sandbox.working_folder
            await job.close()
            assert is_gone(folder)

    return asyncio.run(steps())


def score(result: JobResult) -> float | None:
    given = result.trial_results[0].verifier_result
    return None if given is None else given.rewards["reward"]


def test_a_job_keeps_the_callers_secrets_and_gives_the_agent_its_address_and_task(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "the-callers")
    monkeypatch.setenv("SOME_SECRET", "the-callers")
    kwargs = {"api_base": "http://h/~k", "api_key": "agents", "max_iterations": 3}
    agent = {"command": "env; cat $TASK_FILE", "kwargs": kwargs, "env": {"OWN": 1}, "model_name": "openai/m"}
    told = run(agent, {"command": "env"}, task={"x": "y"}, environment={"env": {"ALL": "a"}}).trial_results[0]
    seen, verifiers = told.agent_output, told.verifier_output
    assert "the-callers" not in seen + verifiers and "agents" not in verifiers
    for line in ("OPENAI_BASE_URL=http://h/~k/v1", "ANTHROPIC_BASE_URL=http://h/~k", "OPENAI_API_KEY=agents"):
        assert line in seen.splitlines()
    assert {"OWN=1", "ALL=a", "OPENAI_MODEL=m"} <= set(seen.splitlines()) and '"max_iterations": 3' in seen
    assert seen.endswith('{"x": "y"}') and "ALL=a" in verifiers


def test_the_reward_is_what_the_verifier_writes_or_how_it_exits() -> None:
    agent = {
        "command": "echo 9 > reward.txt; mkdir -p $VERIFIER_DIR; echo 9 > $VERIFIER_DIR/reward.txt; echo ok > work"
    }
    assert score(run(agent, {"command": "grep ok work"})) == 1.0
    assert score(run(agent, {"command": ["grep", "no", "work"]})) == 0.0
    assert score(run(agent, {"command": "echo 0.25 > $VERIFIER_DIR/reward.txt; exit 1"})) == 0.25
    assert score(run(agent, {"command": "echo '{\"reward\": 0.75}' > $VERIFIER_DIR/reward.json"})) == 0.75
    assert score(run({"command": "true"})) is None
    for wrong in ("echo none > $VERIFIER_DIR/reward.txt", "echo '{}' > $VERIFIER_DIR/reward.json"):
        failed = run(agent, {"command": wrong})
        assert (failed.status, score(failed)) == ("Failed", None)
        assert "the reward in VERIFIER_DIR cannot be read" in str(failed.trial_results[0].exception_info)


def test_what_an_agent_writes_in_the_place_of_the_verifier_does_not_count_and_its_work_is_kept() -> None:
    forged = "mkdir -p verifier/evaluation; echo 9 > verifier/evaluation/report.json; echo own > verifier/mine"
    assert (
        score(run({"command": forged}, {"command": "grep own verifier/mine && ! test -e verifier/evaluation/*"})) == 1.0
    )


def test_an_agent_that_fails_or_takes_too_long_is_verified_and_says_why() -> None:
    failed = run({"command": "echo earned > work; echo broken >&2; exit 3"}, {"command": "cat work"})
    assert (failed.status, failed.exit_code, score(failed)) == ("Failed", 3, 1.0)
    assert failed.trial_results[0].exception_info == "the agent exited with 3: broken"
    slow = {"setup_command": "echo earned > work", "command": "sleep 600", "max_timeout_sec": 0.2}
    late = run(slow, {"command": "cat work"})
    assert (late.status, score(late)) == ("Timeout", 1.0)
    stuck = run({"command": "true"}, {"command": "sleep 600", "max_timeout_sec": 0.2})
    assert (stuck.status, score(stuck)) == ("Failed", None)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds them by /proc")
def test_processes_that_an_agent_leaves_serve_the_verifier_and_are_killed_with_the_sandbox() -> None:
    result = run(
        {"command": LINGERING}, {"command": "cat pids; for pid in $(cat pids); do kill -0 $pid || exit 1; done"}
    )
    pids = [int(line) for line in result.trial_results[0].verifier_output.split()]
    assert (len(pids), score(result)) == (2, 1.0)
    assert not any(alive(pid) for pid in pids)


KILLED = """
import asyncio, os, signal
from tokengrove.roll.rock import LocalProcessSandbox
async def steps():
    sandbox = LocalProcessSandbox({})
    await sandbox.start()
    process = await sandbox.launch("sleep 600")
    print(process.pid, sandbox.working_folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(steps())
"""


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds them by /proc")
async def test_sandboxes_of_a_process_that_is_killed_are_cleaned_up() -> None:
    killed = await asyncio.create_subprocess_exec(sys.executable, "-c", KILLED, stdout=asyncio.subprocess.PIPE)
    output, _ = await killed.communicate()
    pid, folder = output.decode().split()
    await until(lambda: not alive(int(pid)) and is_gone(folder))


def test_the_end_of_a_long_output_is_kept() -> None:
    (trial,) = run({"command": "yes | head -c 3000000; echo the end"}).trial_results
    assert trial.agent_output.endswith("y\nthe end\n") and len(trial.agent_output) == 256 * 1024


def test_a_submission_that_fails_leaves_nothing_and_can_be_tried_again(tmp_path: Path) -> None:
    setup = f"pwd > {tmp_path}/where; test -e {tmp_path}/ready || (echo not yet; exit 4)"

    async def steps() -> JobResult:
        job = Job(JobConfig({"agents": [{"command": "true", "setup_command": setup}]}))
        with pytest.raises(RuntimeError, match="exited with 4: not yet"):
            await job.submit()
        assert is_gone((tmp_path / "where").read_text().strip())
        (tmp_path / "ready").touch()
        await job.submit()
        result = await job.wait()
        await job.close()
        return result

    assert asyncio.run(steps()).status == "Finished"


def test_a_place_that_neither_starts_nor_stops_says_why_it_did_not_start() -> None:
    class Broken(LocalProcessSandbox):
        stops = 0

        async def start(self) -> None:
            raise ConnectionError("no such place")

        async def stop(self) -> None:
            Broken.stops += 1
            raise RuntimeError("nothing to stop")

    async def steps() -> None:
        job = Job(JobConfig({"agents": [{"command": "true"}]}), Broken)
        await job.close()
        with pytest.raises(ConnectionError, match="no such place"):
            await job.submit()
        await job.close()

    asyncio.run(steps())
    assert Broken.stops == 1


def test_a_sandbox_that_is_not_ready_in_time_is_a_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"0.2 s \(startup_timeout\)"):
        run({"command": "true", "setup_command": "sleep 600"}, environment={"startup_timeout": 0.2})


def test_files_stay_inside_of_the_sandbox() -> None:
    async def steps() -> None:
        sandbox = LocalProcessSandbox({})
        await sandbox.start()
        await sandbox.upload("a/b.txt", b"text")
        assert await sandbox.read_file(f"{sandbox.working_folder}/a/b.txt") == "text"
        with pytest.raises(FileNotFoundError):
            await sandbox.download("a/c.txt")
        with pytest.raises(InvalidRequest, match="outside"):
            await sandbox.upload("../../escaped", b"")
        os.symlink(Path.home(), f"{sandbox.working_folder}/home")
        with pytest.raises(InvalidRequest, match="outside"):
            await sandbox.upload("home/escaped", b"")
        await sandbox.stop()

    asyncio.run(steps())


def test_a_reward_that_cannot_be_read_costs_the_reward_and_nothing_else() -> None:
    for written, reason in (
        ("ln -s /etc/passwd reward.json", "outside"),
        ("truncate -s 100M reward.json", "more than"),
        ("yes [ | head -100000 > reward.json", "Recursion"),
    ):
        result = run({"command": "true"}, {"command": f"cd $VERIFIER_DIR && {written}"})
        assert result.status == "Failed" and reason in str(result.trial_results[0].exception_info)
    result = run({"command": "true"}, {"command": "mkfifo $VERIFIER_DIR/reward.json"})
    assert result.status == "Finished" and score(result) == 1.0


def test_folders_of_any_depth_are_removed() -> None:
    deep = "import os\nfor _ in range(1500): os.mkdir('a'); os.chdir('a')"
    assert run({"command": [sys.executable, "-c", deep]}).status == "Finished"


DOCKER = """#!/bin/sh
# A docker whose containers are folders.
case $1 in
run) name=${4#--name=}; mkdir -p $HOME/$name; echo "$@" > $HOME/started ;;
exec) shift; name=; while :; do case $1 in
    --workdir=*) shift ;;
    --env=*) export "${1#--env=}"; shift ;;
    *) name=$1; shift; break ;;
    esac; done; cd $HOME/$name && exec "$@" ;;
rm) rm -r $HOME/$3; echo "$@" > $HOME/removed ;;
esac
"""


class DockerSandbox(CommandSandbox):
    async def start(self) -> None:
        self.name = f"job-{uuid.uuid4().hex}"
        image, limits = self.environment["image"], [f"--memory={self.environment['memory']}"]
        await self.on_this_machine(["docker", "run", "-d", *limits, f"--name={self.name}", image, "sleep", "infinity"])

    @property
    def working_folder(self) -> str:
        return "."

    def command_line(self, words: Sequence[str], env: Mapping[str, str]) -> list[str]:
        variables = [f"--env={name}={value}" for name, value in env.items()]
        return ["docker", "exec", f"--workdir={self.working_folder}", *variables, self.name, *words]

    async def stop(self) -> None:
        await self.on_this_machine(["docker", "rm", "--force", self.name])


def test_a_job_runs_where_a_command_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "docker"
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    content = bytes(range(256)) * 500

    async def steps() -> JobResult:
        agent = {"command": "cat $TASK_FILE; echo $ALL $OWN > out", "env": {"OWN": "o"}}
        environment = {"image": "python:3", "memory": "1g", "env": {"ALL": "a b"}}
        config = {"agents": [agent], "verifier": {"command": "grep 'a b o' out"}, "environment": environment}
        job = Job(JobConfig({**config, "task": {"x": "it's"}}), DockerSandbox)
        await job.submit()
        result = await job.wait()
        await job.sandbox.upload("deep/er/it's", content)
        assert await job.sandbox.download("deep/er/it's") == content
        with pytest.raises(FileNotFoundError):
            await job.sandbox.download("absent")
        await job.close()
        return result

    result = asyncio.run(steps())
    assert (result.status, score(result)) == ("Finished", 1.0)
    assert result.trial_results[0].agent_output == '{"x": "it\'s"}'
    assert "--memory=1g" in (tmp_path / "started").read_text() and "job-" in (tmp_path / "removed").read_text()


def solve(task: dict[str, Any], max_iterations: int) -> float:
    return float(task["worth"] * max_iterations)


async def misled(task: dict[str, Any]) -> None:
    raise ValueError(f"no {task['worth']}")


@pytest.mark.wide
def test_a_python_function_is_an_agent_and_may_give_the_reward() -> None:
    here = "tests.unit.tokengrove.roll.test_roll_rock_jobs"
    task = {"worth": 0.5}
    result = run({"import_path": f"{here}:solve", "kwargs": {"max_iterations": 3, "other": 1}}, task=task)
    assert (result.status, score(result)) == ("Finished", 1.5)
    failed = run({"import_path": f"{here}:misled"}, task=task)
    assert failed.status == "Failed" and "ValueError: no 0.5" in str(failed.trial_results[0].exception_info)


def test_a_configuration_that_cannot_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"agents\[0\].command"):
        Job(JobConfig({"agents": [{"name": "swe-agent"}]}))
    with pytest.raises(InvalidRequest, match="import_path"):
        Job(JobConfig())
    with pytest.raises(InvalidRequest, match="list of sections"):
        JobConfig({"agents": {"command": "true"}})
    (tmp_path / "bad.yaml").write_text("a: [")
    for name, text in (("bad.yaml", "not valid YAML"), ("absent.yaml", "No such file")):
        with pytest.raises(InvalidRequest, match=text):
            JobConfig.from_yaml(tmp_path / name)
