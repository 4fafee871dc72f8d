"""Runners of jobs that call the server: what an episode gives back, and what is recorded of it to the token."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.support import real_server, sampled
from tests.unit.tokengrove.rollout.folder_sandbox import PARENT, made
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.roll import EpisodeResult, PushModeRunner, RockAgentRunner
from tokengrove.roll.rock import JobConfig, LocalProcessSandbox, rock_agent_runner

AGENT = """
import json, os, openai
task = json.load(open(os.environ["TASK_FILE"]))
kwargs = json.loads(os.environ["AGENT_KWARGS"])
messages = [{"role": "user", "content": f"Say exactly: {word}"} for word in task["words"][:1]]
client = openai.OpenAI()
for word in task["words"][1:] + [""]:
    answer = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    messages += [answer.choices[0].message, {"role": "user", "content": f"Say exactly: {word}"}]
    print(answer.choices[0].message.content, file=open("answers", "a"))
"""
REPORT = {
    "task-1": {
        "tests_status": {
            "FAIL_TO_PASS": {"success": ["a", "b", "c"], "failure": ["d"]},
            "PASS_TO_PASS": {"success": ["e"], "failure": []},
        }
    }
}
VERIFIER = f"echo '{json.dumps(REPORT)}' > $VERIFIER_DIR/evaluation/report.json; grep -q dawn answers"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("push")
    with real_server(folder, engine_arg=("play=agent",), admin_key="admin", require_key=True) as address:
        yield address


def config(folder: Path, command: Any = "true", verifier: str = "true", **more: Any) -> dict[str, Any]:
    tasks = folder / "tasks.jsonl"
    row = {"words": ["night", "dawn"], "extra_info": {"instanceid": "org/task-1", "datasetname": "d"}}
    tasks.write_text(json.dumps(row) + "\n")
    job = {"agents": [{"command": command}], "verifier": {"command": verifier}}
    return {"config": {"dataset_name": str(tasks), "mode": "traversal", "job_config": job, **more}}


def test_a_job_calls_back_and_its_turns_are_recorded_to_the_token(url: str, tmp_path: Path) -> None:
    with Client(url, admin_key="admin") as client:
        session = client.start_session("t", api_key="a-key-of-16-characters")
        given = config(tmp_path, ["python", "-c", AGENT], VERIFIER, infer_callback_url=url)
        runner = PushModeRunner(
            "http://unreachable.invalid/~a-key-of-16-characters", 4, given, api_key="a-key-of-16-characters"
        )
        result = runner.run_job(11)
        assert runner.run_job(12).status == "NoData"
        session.end()
        (sample,) = client.export(session_id=session.session_id).samples
    assert (result.status, result.score, result.agent_exit_reason) == ("Finished", 1.0, "")
    metrics = result.metrics
    assert (metrics["pass_rate"], metrics["exit_code"], metrics["instance_id"]) == (0.75, 0, "org/task-1")
    ratios = [metrics[f"{part}_time_ratio"] for part in ("env_setup", "agent_setup", "agent_execution")]
    assert 0 < metrics["agent_execution_time_ratio"] <= sum(ratios) <= 100.1 and metrics["time_total_sec"] > 0
    trained = sample.input_ids[sample.loss_mask == 1].tolist()
    assert trained == [*sampled("night"), *sampled("dawn")]


def test_a_job_runs_in_a_remote_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PARENT, str(tmp_path / "sandboxes"))
    place = "tests.unit.tokengrove.rollout.folder_sandbox.FolderSandbox"
    command = 'test "$PWD" = "$HOME/work" && test -e ../image && test "$TREE" = oak && cp $TASK_FILE answers'
    given = config(tmp_path, command, "grep -q dawn answers", sandbox_cls=place)
    given["config"]["job_config"]["environment"] = {"max_concurrent": 1, "env": {"TREE": "oak"}}
    result = PushModeRunner("http://h", 4, given).run_job(1)
    assert (result.status, result.score, result.agent_exit_reason) == ("Finished", 1.0, "")
    assert made() == []


@pytest.mark.parametrize(
    ("to_pass", "to_keep", "rate"),
    [
        ({"success": ["a"], "failure": ["b", "c", "d"]}, {"success": []}, 0.25),
        ({"success": ["a"]}, {"failure": ["e"]}, 0.0),
        ({"success": [], "failure": []}, {}, None),
        (None, None, None),
    ],
)
def test_the_pass_rate_is_that_of_the_failing_tests_unless_a_passing_one_breaks(
    tmp_path: Path, to_pass: Any, to_keep: Any, rate: float | None
) -> None:
    report = json.dumps({"tests_status": {"FAIL_TO_PASS": to_pass, "PASS_TO_PASS": to_keep}})
    verifier = f"mkdir -p verifier/evaluation; echo '{report}' > verifier/evaluation/report.json"
    result = PushModeRunner("http://h", 4, config(tmp_path, "true", verifier)).run_job(1)
    assert (result.metrics.get("pass_rate"), result.score) == (rate, 1.0)


def test_how_a_job_ends_is_how_its_episode_ends(tmp_path: Path) -> None:
    def ended(command: str, verifier: str = "test -e work", **more: Any) -> EpisodeResult:
        (tmp_path / command.partition(" ")[0]).mkdir(exist_ok=True)
        given = config(tmp_path / command.partition(" ")[0], command, verifier, **more)
        return PushModeRunner("http://h", 4, given).run_job(1)

    late = ended("sleep 600", "true", task_timeout_sec=0.2)
    assert (late.status, late.score) == ("Timeout", 1.0) and "time limit of 0.2 s" in late.agent_exit_reason
    failed = ended("echo oh no; exit 5")
    assert (failed.status, failed.score, failed.metrics["exit_code"]) == ("Failed", 0.0, 5)
    assert "oh no" in failed.agent_exit_reason
    assert "pass_rate" not in ended("true", "echo no json > $VERIFIER_DIR/evaluation/report.json").metrics


def test_a_place_that_cannot_be_stopped_does_not_cost_what_the_job_has_earned(tmp_path: Path) -> None:
    class Unstoppable(LocalProcessSandbox):
        async def stop(self) -> None:
            await super().stop()
            raise ConnectionError("the cluster does not answer")

    result = PushModeRunner("http://h", 4, config(tmp_path, sandbox_cls=Unstoppable)).run_job(1)
    assert (result.status, result.score) == ("Finished", 1.0)


async def test_a_notebook_whose_thread_has_an_event_loop_runs_jobs(tmp_path: Path) -> None:
    assert PushModeRunner("http://h", 4, config(tmp_path)).run_job(1).status == "Finished"


def test_a_job_is_cancelled_from_another_thread_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    running = threading.Event()

    class Watched(LocalProcessSandbox):
        async def launch(self, *command: Any) -> Any:
            process = await super().launch(*command)
            running.set()
            return process

        async def stop(self) -> None:
            folders.append(self.working_folder)
            await super().stop()

    folders: list[str] = []
    runner = PushModeRunner("http://h", 4, config(tmp_path, "sleep 600", sandbox_cls=Watched))
    runner.cancel()
    with ThreadPoolExecutor(1) as thread:
        job = thread.submit(runner.run_job, 1)
        assert running.wait(60)
        runner.cancel()
        result = job.result(60)
    assert (result.status, result.agent_exit_reason) == ("Failed", "CancelledError: the job was cancelled")
    assert len(folders) == 1 and not Path(folders[0]).exists()


class Unready(LocalProcessSandbox):
    """A place whose first starts fail."""

    failures: ClassVar[list[str]] = []

    async def start(self) -> None:
        if self.failures:
            raise ConnectionError(self.failures.pop())
        await super().start()


def test_a_job_is_submitted_three_times_at_most_with_growing_pauses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(pause_s: float) -> None:
        pauses.append(pause_s)

    monkeypatch.setattr(rock_agent_runner, "sleep", sleep)
    runner = PushModeRunner("http://h", 4, config(tmp_path, sandbox_cls=Unready))
    Unready.failures = ["second", "first"]
    assert (runner.run_job(1).status, pauses) == ("Finished", [1.0, 2.0])
    Unready.failures = ["fourth", "third", "second", "first"]
    failed = runner.run_job(1)
    assert (failed.status, failed.score, failed.agent_exit_reason) == ("Failed", 0.0, "ConnectionError: third")
    assert (Unready.failures, pauses) == (["fourth"], [1.0, 2.0, 1.0, 2.0])


def test_the_job_has_what_the_file_the_environment_and_the_trainer_say(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(
        "agents: [{name: swe, command: 'true', kwargs: {max_iterations: 200, own: 1, temperature: '1.0'}}]\n"
        "datasets: [{name: x, registry: {split: ''}}]\n"
        "environment: {env: {KEPT: a, DATASET: ''}, image: i}\n"
        "verifier: {mode: native, native_config: {template: {name: x}}}\n"
    )
    given = config(tmp_path, max_iterations=7, task_timeout_sec=5, scaffold_config="qwen", num_retries=1)
    given["config"].pop("job_config")
    given["config"]["job_config_path"] = str(tmp_path / "job.yaml")
    worker = SimpleNamespace(generating_args={"temperature": 0.5, "max_new_tokens": 64})

    class Own(RockAgentRunner):
        def run_job(self, seed: int) -> EpisodeResult:
            raise NotImplementedError

        def _build_job_config(self, task_config: dict[str, Any], job_id: str) -> JobConfig:
            job = super()._build_job_config(task_config, job_id)
            job.agents[0].kwargs["mine"] = job.environment.image
            return job

    runner = Own("http://h/~k", 4, given, worker_config=worker)
    item = runner._load_data_item(3)
    assert item is not None and item["seed"] == 3
    task_config = runner._build_task_config_from_data_item(item)
    job = runner._build_job_config({**task_config, "infer_callback_url": runner.infer_callback_url}, "j")
    kwargs = job.agents[0].kwargs
    assert (kwargs.max_iterations, kwargs.temperature, kwargs.max_tokens, kwargs.num_retries) == (7, 0.5, 64, 1)
    assert (kwargs.own, kwargs.mine, kwargs.api_key, kwargs.api_base) == (1, "i", "4", "http://h/~k")
    assert (kwargs.sweagent_config, kwargs.tools_parse_function) == ("qwen", "function_calling")
    assert (job.agents[0].max_timeout_sec, job.job_name, job.task["words"]) == (5.0, "j", ["night", "dawn"])
    assert job.environment.env == {"KEPT": "a", "INSTANCE_ID": "org/task-1", "DATASET": "d", "SPLIT": "test"}
    assert (job.datasets[0].task_names, job.datasets[0].name) == (["org/task-1"], "d")
    assert job.verifier.native_config.template.name == "swe/d"
    assert runner._base_job_config.agents[0].kwargs.max_iterations == 200


def test_results_of_another_job_are_read_by_attribute_and_key(tmp_path: Path) -> None:
    class Given:
        def __init__(self, config: Any, sandbox_cls: Any) -> None:
            self.config, self.sandbox = config, None

        async def submit(self) -> None: ...

        async def close(self) -> None: ...

        async def wait(self) -> Any:
            times = {"started_at": "2026-01-01T00:00:00Z", "finished_at": "2026-01-01T00:00:10Z"}
            setup = {"started_at": "2026-01-01T00:00:00", "finished_at": "2026-01-01T00:00:04"}
            trial = SimpleNamespace(**times, environment_setup=setup, verifier_result=None, exception_info=None)
            trial.verifier_result = SimpleNamespace(rewards={"reward": 1})
            return SimpleNamespace(status=SimpleNamespace(value="completed"), exit_code=0, trial_results=[trial])

    class Runner(PushModeRunner):
        job_cls = Given

    result = Runner("http://h", 4, config(tmp_path)).run_job(1)
    assert (result.status, result.score, result.metrics["time_total_sec"]) == ("Finished", 1.0, 10.0)
    assert result.metrics["env_setup_time_ratio"] == 40.0


def test_a_runner_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="dataset_name"):
        PushModeRunner("http://h", 4, {"config": {}})
    given = config(tmp_path)
    given["config"].pop("job_config")
    with pytest.raises(InvalidRequest, match=r"agents\[0\].command"):
        PushModeRunner("http://h", 4, given)
    in_process = PushModeRunner("http://h", 4, config(tmp_path))
    in_process.http_client = object()
    with pytest.raises(InvalidRequest, match="another process"):
        in_process.run_job(1)
