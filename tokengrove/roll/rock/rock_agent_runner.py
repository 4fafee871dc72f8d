"""The base of runners whose agent is a program in a sandbox: data, the configuration of a job, and its metrics.

The methods have ROLL's names, so that subclasses written for ROLL may override them. As in ROLL, methods that use a
job are coroutines.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import threading
import uuid
from asyncio import sleep
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import InvalidRequest
from tokengrove.roll.rock.agent_address import seen_from_outside
from tokengrove.roll.rock.data_files import Row
from tokengrove.roll.rock.global_dataset import shared_dataset
from tokengrove.roll.rock.job import Job, agent_command, job_folder
from tokengrove.roll.rock.job_config import JobConfig
from tokengrove.roll.rock.reports import pass_rate, tests_status
from tokengrove.roll.runners import AgentRunner
from tokengrove.roll.values import EpisodeResult, Section
from tokengrove.rollout.imports import load
from tokengrove.rollout.sandboxes.local_process_sandbox import LocalProcessSandbox

T = TypeVar("T")
DEFAULT_JOB_CONFIG_PATH = "roll/pipeline/agentic/env/rock/harbor_service_config.yaml"
"""The file of a job's configuration in ROLL's repository, read by default if it exists."""

_AGENT_KWARGS = {
    "sweagent_config": "anthropic",
    "max_iterations": 15,
    "temperature": 0.99,
    "max_tokens": 2048,
    "num_retries": 4,
    "tools_parse_function": "function_calling",
    "full_history": True,
    "max_observation_length": 10000,
}
_STATUS = {
    **dict.fromkeys(("finished", "completed", "complete", "success", "succeeded"), "Finished"),
    **dict.fromkeys(("timeout", "timed_out", "timedout"), "Timeout"),
}
_ATTEMPTS = 3


class RockAgentRunner(AgentRunner):
    """Runs jobs. It reads these settings of `env_config.config`:

    - `dataset_name`, `mode`: the tasks; see `GlobalDataset`
    - `job_config_path`, a YAML file, or `job_config`, its content: the job; see `JobConfig`
    - `sandbox_cls`: a subclass of `Sandbox` or the path of one (default: this machine)
    - `task_timeout_sec` (1800), `max_iterations` (15), `num_retries` (4), `scaffold_config` ("anthropic"),
      `model_name`: passed to the agent; its temperature and answer length are those of `generating_args`
    - `infer_callback_url`: the public address of the server, if the sandbox cannot reach `base_url`
    """

    sandbox_cls: Any = LocalProcessSandbox
    job_cls: Callable[..., Any] = Job
    enforces_task_timeout = True
    """The job itself is ended after `task_timeout_sec` and verified, so managers do not apply this limit."""
    retry_delay_s = 1.0
    """The pause before the second attempt to submit a job, to wait for it, or to get the agent's next request. The
    pause before the third attempt is twice as long."""

    def __init__(self, base_url: str, env_id: int, env_config: Any, worker_config: Any = None, **kwargs: Any) -> None:
        """Raises InvalidRequest without `dataset_name`, for a data set or file that cannot be read, and for a
        configuration without an agent."""
        super().__init__(base_url, env_id, env_config, worker_config=worker_config, **kwargs)
        self.logger = logging.getLogger(__name__)
        params = self.env_params
        if not params.get("dataset_name"):
            raise InvalidRequest(
                f"{type(self).__name__} needs 'dataset_name' in env_config.config: a file or folder of tasks",
                param="dataset_name",
            )
        name = params["dataset_name"]
        self.dataset: Any = shared_dataset(name if isinstance(name, str) else list(name), self.mode)
        if (path := params.get("sandbox_cls")) is not None:
            self.sandbox_cls = load(path) if isinstance(path, str) else path
        self._base_job_config = _base_job_config(params)
        if self.job_cls is Job and type(self)._build_job_config is RockAgentRunner._build_job_config:
            agent_command(self._base_job_config.agent)
        self.listen_port = self.env_config.get("proxy_port", 8000)
        self._callback_url: str | None = None
        self._job_error: BaseException | None = None
        self._lock = threading.Lock()
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Future[Any]] | None = None

    @property
    def infer_callback_url(self) -> str | None:
        """The address for the next job: `_generate_callback_url()`, unless it is set."""
        return self._callback_url or self._generate_callback_url()

    @infer_callback_url.setter
    def infer_callback_url(self, url: str | None) -> None:
        self._callback_url = url

    def _load_data_item(self, seed: int) -> Row | None:
        """The task of a seed, with `seed` in it; None if there are no more."""
        item: Row | None = self.dataset.get_data_item(seed=seed)
        return None if item is None else {**item, "seed": seed}

    def _generate_callback_url(self) -> str | None:
        """The address at which the agent's requests reach the session: `infer_callback_url`, or else `base_url`.

        ROLL registers its proxy with a load balancer by TASK_ID and PROXY_ROUTER_TYPE. The server here has one public
        address for all episodes, so nothing is registered.
        """
        public = self.env_params.get("infer_callback_url")
        return seen_from_outside(self.base_url, public) if public else self.base_url

    def _build_task_config_from_data_item(self, data_item: Row) -> dict[str, Any]:
        """The settings of a task. `PushModeRunner` adds `infer_callback_url`."""
        params, kwargs = self.env_params, _file_kwargs(self._base_job_config)
        about = _about(data_item)
        timeout_s = float(params.get("task_timeout_sec", 1800))
        left_s = self._time_left()
        return {
            "metadata": {"step_id": 0},
            "data_config": {
                "instance_id": _instance_id(data_item),
                "dataset": about.get("datasetname", "unknown"),
                "split": about.get("datasettype", "test"),
            },
            "llm_config": {
                "model_name": params.get("model_name", "default_model"),
                "api_key": str(self.env_id) if self.api_key is None else self.api_key,
                "generation_config": _generating_args(self.worker_config),
            },
            "runtime_config": {"task_timeout_sec": timeout_s if left_s is None else min(timeout_s, left_s)},
            "agent_config": {
                "max_iterations": params.get("max_iterations", kwargs["max_iterations"]),
                "scaffold_config": params.get("scaffold_config", kwargs["sweagent_config"]),
                "num_retries": params.get("num_retries", kwargs["num_retries"]),
            },
            "data_item": data_item,
        }

    def _build_job_config(self, task_config: dict[str, Any], job_id: str) -> JobConfig:
        """The configuration of a job: the file's, with the settings of a task. `task` is the data for the agent."""
        config = self._base_job_config.model_copy(deep=True)
        llm, agent_config = task_config.get("llm_config", {}), task_config.get("agent_config", {})
        data, sampling = task_config.get("data_config", {}), llm.get("generation_config", {})
        kwargs = _file_kwargs(config)
        told = {
            "api_key": llm.get("api_key", ""),
            "api_base": task_config.get("infer_callback_url") or "",
            "sweagent_config": agent_config.get("scaffold_config", kwargs["sweagent_config"]),
            "max_iterations": agent_config.get("max_iterations", kwargs["max_iterations"]),
            "num_retries": agent_config.get("num_retries", kwargs["num_retries"]),
            "temperature": sampling.get("temperature", kwargs["temperature"]),
            "max_tokens": sampling.get("max_new_tokens", kwargs["max_tokens"]),
        }
        agent = {
            "name": "agent",
            **(config["agents"][0] if config["agents"] else {}),
            "model_name": f"openai/{llm.get('model_name', 'default_model')}",
            "max_timeout_sec": task_config.get("runtime_config", {}).get("task_timeout_sec", 300),
            "kwargs": {**kwargs, **told},
        }
        config.job_name, config.agents, config.task = job_id, [agent], task_config.get("data_item")
        config.experiment_id = os.environ.get("TASK_ID", config.get("experiment_id", ""))
        _name_task(config, data)
        return config

    def _extract_metrics(self, result: Any, job_id: str, instance_id: str) -> dict[str, Any]:
        """The status, score and metrics of a job's result, a JobResult or an object with Rock's attributes.

        Times are in seconds; ratios are percentages of the total time.
        """
        status = getattr(result, "status", "Failed")
        metrics: dict[str, Any] = {
            "job_id": job_id,
            "instance_id": instance_id,
            "status": str(getattr(status, "value", status)),
            "exit_code": getattr(result, "exit_code", 0),
            "score": 0.0,
            "agent_exit_reason": "",
            "time_total_sec": 0.0,
            "env_setup_time_ratio": 0.0,
            "agent_setup_time_ratio": 0.0,
            "agent_execution_time_ratio": 0.0,
        }
        if not (trials := getattr(result, "trial_results", None)):
            return metrics
        trial = trials[0]
        if reason := getattr(trial, "exception_info", None):
            metrics["agent_exit_reason"] = str(reason)
        rewards = getattr(getattr(trial, "verifier_result", None), "rewards", None) or {}
        metrics["score"] = float(rewards.get("reward", 0.0))
        total_s = self._get_duration(trial)
        metrics["time_total_sec"] = round(total_s, 2)
        for name, part in _PARTS.items():
            part_s = self._get_duration(getattr(trial, part, None))
            metrics[name] = round(100 * part_s / total_s, 2) if total_s else 0.0
        return metrics

    def _get_duration(self, timing: Any) -> float:
        """The seconds from `started_at` to `finished_at` of an object or dict; 0.0 if one is missing."""
        begin, end = (_moment(timing, name) for name in ("started_at", "finished_at"))
        return 0.0 if begin is None or end is None else max(0.0, (end - begin).total_seconds())

    @staticmethod
    def _extract_tests_status(report: Any) -> Mapping[str, Any] | None:
        """`tests_status` of a report, which may be inside an entry."""
        return tests_status(report)

    async def _read_pass_rate_from_sandbox(self, sandbox: Any, config: Any) -> float | None:
        """The pass rate in `verifier/evaluation/report.json`, in the job's folder or the working folder.

        None if there is no report, or it has no FAIL_TO_PASS test.
        """
        pattern = "*verifier/evaluation/report.json"
        found = await sandbox.run(["find", job_folder(config), "verifier", "-path", pattern])
        files = [line for line in found.output.splitlines() if line.endswith("verifier/evaluation/report.json")]
        if not files:
            return None
        status = self._extract_tests_status(json.loads(await sandbox.read_file(files[0])))
        return None if status is None else pass_rate(status)

    def _build_result_from_metrics(self, metrics: dict[str, Any]) -> EpisodeResult:
        """The episode's result; entries that are not its fields remain metrics."""
        status = str(metrics.pop("status", "Failed"))
        known = _STATUS.get(status.lower(), "NoData" if status == "NoData" else "Failed")
        reason = metrics.pop("agent_exit_reason", "")
        if known == "Failed" and not reason:
            reason = f"the job ended with the status {status!r}, and without exception_info"
        result = EpisodeResult(known, float(metrics.pop("score", 0.0)), agent_exit_reason=reason, metrics=metrics)
        result.error, self._job_error = self._job_error, None
        return result

    def _run_async_job(
        self, coro: Coroutine[Any, Any, dict[str, Any]], job_id: str, instance_id: str
    ) -> dict[str, Any]:
        """Run a job on its own event loop; return its metrics, which contain the error if it failed."""
        try:
            return _run(self._cancellable(coro))
        except (Exception, asyncio.CancelledError) as error:
            self._job_error = error  # the caller that plays the episode logs it
            return {
                "job_id": job_id,
                "instance_id": instance_id,
                "status": "Failed",
                "score": 0.0,
                "agent_exit_reason": exit_reason(error),
            }

    def cancel(self) -> None:
        """End the running job, if any, from any thread: its sandbox is stopped, and `run_job` returns Failed."""
        with self._lock:
            if self._running is not None:
                loop, task = self._running
                loop.call_soon_threadsafe(task.cancel, "the job was cancelled")

    async def _cancellable(self, coro: Coroutine[Any, Any, T]) -> T:
        task = asyncio.ensure_future(coro)
        with self._lock:
            self._running = asyncio.get_running_loop(), task
        try:
            return await task
        finally:
            with self._lock:
                self._running = None

    async def _metrics_of(self, job: Any, task_config: Mapping[str, Any]) -> dict[str, Any]:
        """Wait for a job; return its metrics, with the pass rate if there is one."""
        config = job.config
        result = await self._attempted("wait for the job", job.wait)
        instance_id = task_config.get("data_config", {}).get("instance_id", "unknown")
        metrics = self._extract_metrics(result, config.job_name, instance_id)
        try:
            rate = await self._read_pass_rate_from_sandbox(job.sandbox, config)
        except Exception as error:
            self.logger.warning("job %s: report.json cannot be read: %s", config.job_name, error)
            return metrics
        return metrics if rate is None else {**metrics, "pass_rate": rate}

    async def _closed(self, what: str, close: Callable[[], Awaitable[None]]) -> None:
        """Await `close()`; an error is only logged, since the job has its result."""
        try:
            await close()
        except Exception as error:
            self.logger.warning("%s cannot be closed: %s", what, exit_reason(error))

    async def _attempted(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call()`, with up to two retries. Raises the last error; InvalidRequest is raised at once."""
        for attempt in range(_ATTEMPTS - 1):
            try:
                return await call()
            except InvalidRequest:
                raise
            except Exception as error:
                pause_s = self.retry_delay_s * 2**attempt
                self.logger.warning(
                    "cannot %s (attempt %d of %d): %s; again in %g s", what, attempt + 1, _ATTEMPTS, error, pause_s
                )
                await sleep(pause_s)
        return await call()


def _run(coro: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on its own event loop; in a thread if this one has a running loop, as in notebooks."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coro)
    with ThreadPoolExecutor(1, "tokengrove-job") as thread:
        return thread.submit(asyncio.run, coro).result()


_PARTS = {
    "env_setup_time_ratio": "environment_setup",
    "agent_setup_time_ratio": "agent_setup",
    "agent_execution_time_ratio": "agent_execution",
}


def new_job_id(prefix: str, data_item: Row) -> tuple[str, str]:
    """A name for a job, which is also the name of a folder, and the id of its instance."""
    instance_id = _instance_id(data_item)
    return f"{prefix}_{re.sub(r'[^A-Za-z0-9_.-]', '_', instance_id)}_{uuid.uuid4().hex[:8]}", instance_id


def _about(data_item: Row) -> Mapping[str, Any]:
    about = data_item.get("extra_info")
    return about if isinstance(about, Mapping) else {}


def _instance_id(data_item: Row) -> str:
    return str(_about(data_item).get("instanceid") or data_item.get("instance_id") or "unknown")


def _base_job_config(params: Mapping[str, Any]) -> JobConfig:
    given, path = params.get("job_config"), params.get("job_config_path")
    if given is not None and path is not None:
        raise InvalidRequest("give either 'job_config' or 'job_config_path'", param="job_config")
    if given is not None:
        return JobConfig(given)
    if path is None and not Path(DEFAULT_JOB_CONFIG_PATH).is_file():
        return JobConfig()
    return JobConfig.from_yaml(path or DEFAULT_JOB_CONFIG_PATH)


def _file_kwargs(config: JobConfig) -> dict[str, Any]:
    """The agent's `kwargs` in a file, with defaults."""
    agents = config["agents"]
    return {**_AGENT_KWARGS, **((agents[0].get("kwargs") or {}) if agents else {})}


def _generating_args(worker_config: Any) -> dict[str, Any]:
    """`generating_args` of a manager's configuration, a section or an object with `to_dict`."""
    args = getattr(worker_config, "generating_args", None)
    if args is None:
        return {}
    values = dict(args.to_dict() if hasattr(args, "to_dict") else args)
    return {name: value for name, value in values.items() if value is not None}


def _name_task(config: JobConfig, data: Mapping[str, Any]) -> None:
    """Write the task's names to the sections where Rock expects them, if the file has these sections."""
    if config["datasets"]:
        dataset = config["datasets"][0]
        dataset.task_names = [data.get("instance_id")]
        dataset.registry = {**(dataset.get("registry") or {}), "split": data.get("split")}
        dataset.name, dataset.version = data.get("dataset"), data.get("split")
    names = {"INSTANCE_ID": "instance_id", "DATASET": "dataset", "SPLIT": "split"}
    own = {name: data[key] for name, key in names.items() if data.get(key) is not None}
    environment = config["environment"]
    environment.env = {**(environment.get("env") or {}), **own}
    environment.experiment_id = config.experiment_id
    template = (config["verifier"].get("native_config") or Section()).get("template")
    if template is not None:
        template.name = f"{config['agents'][0].name}/{data.get('dataset')}"


def _moment(timing: Any, name: str) -> datetime | None:
    value = timing.get(name) if isinstance(timing, Mapping) else getattr(timing, name, None)
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value)
        except ValueError:
            return None
    return value.replace(tzinfo=None) if isinstance(value, datetime) else None
