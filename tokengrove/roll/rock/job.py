"""One job: a sandbox, an agent that runs in it, and a verifier that scores the result of the agent.

The agent's environment has the address and key of its model in the variables that SDKs read, `TASK_FILE` (the task as
JSON), `AGENT_KWARGS` (its `kwargs` as JSON) and `OPENAI_MODEL`. The verifier, which has none of the keys, writes
`reward.json` ({"reward": 1.0}), `reward.txt` or a report to the folder `VERIFIER_DIR`. If it writes no reward, exit
code 0 means a reward of 1, and other codes 0.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.rock.agent_address import AgentAddress
from tokengrove.roll.rock.job_config import JobConfig, say_unused
from tokengrove.roll.rock.job_result import JobResult, Span, TrialResult, VerifierResult
from tokengrove.roll.values import Section
from tokengrove.rollout.environment import agent_variables
from tokengrove.rollout.sandboxes.local_process_sandbox import LocalProcessSandbox
from tokengrove.rollout.sandboxes.sandbox import Command, CommandResult, Sandbox, SandboxProcess

TASK_FILE = "task.json"
_START_S, _AGENT_S, _VERIFIER_S = 1800.0, 1800.0, 600.0
_SHOWN = 500
_log = logging.getLogger(__name__)

Ready = Callable[[Sandbox], Awaitable[None]]


class Job:
    """A job with `submit`, `wait` and `close`, called in this order on one event loop."""

    def __init__(
        self,
        config: JobConfig,
        sandbox_cls: Callable[[Section], Sandbox] = LocalProcessSandbox,
        on_sandbox_ready: Ready | None = None,
    ) -> None:
        """`on_sandbox_ready(sandbox)` is awaited before the agent starts, and may change `config`.

        Raises InvalidRequest if the configuration has no agent that could run.
        """
        self.config = config
        self.sandbox = sandbox_cls(config["environment"])
        self._sandbox_cls = sandbox_cls
        self.agent: SandboxProcess | None = None
        self._begun = False
        self._ready = on_sandbox_ready
        self._result = TrialResult()
        agent_command(config.agent)
        say_unused(config)

    async def submit(self) -> None:
        """Start the sandbox and the agent in it. After a failure both are cleaned up, and the call may be retried.

        Raises RuntimeError if the setup command fails, and TimeoutError after `environment.startup_timeout`.
        """
        self._result = TrialResult(_now())
        limit_s = _seconds(self.config["environment"], "startup_timeout", _START_S)
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._prepare()
                self.agent = await self.sandbox.launch(agent_command(self.config.agent), self._agent_environment())
        except BaseException as error:
            try:
                await self.close()
            except Exception as failure:
                _log.warning("the sandbox that did not start cannot be stopped: %s", failure)
            self.sandbox = self._sandbox_cls(self.config["environment"])
            if isinstance(error, TimeoutError) and limit.expired():
                raise TimeoutError(f"the sandbox was not ready within {limit_s:g} s (startup_timeout)") from None
            raise
        self._result.agent_execution = Span(_now())

    async def wait(self) -> JobResult:
        """Wait until the agent ends, or kill it after `max_timeout_sec`; verify its result in both cases."""
        if self.agent is None:
            raise InvalidRequest("the job has not been submitted")
        ended = await self.agent.wait(_seconds(self.config.agent, "max_timeout_sec", _AGENT_S))
        result = self._result
        result.agent_execution.finished_at = result.agent_execution.finished_at or _now()
        result.agent_output = ended.output
        result.exception_info = _what_went_wrong(ended, self.config.agent)
        problem = await self._verify(ended)
        result.exception_info = result.exception_info or problem
        result.finished_at = _now()
        status = "Timeout" if ended.timed_out else "Finished" if ended.exit_code == 0 and problem is None else "Failed"
        return JobResult(status, ended.exit_code, [result])

    async def close(self) -> None:
        """Stop the sandbox if it was started, and delete its processes and files."""
        if self._begun:
            self._begun = False
            await self.sandbox.stop()

    async def _prepare(self) -> None:
        result, agent = self._result, self.config.agent
        result.environment_setup = Span(_now())
        self._begun = True
        await self.sandbox.start()
        await self.sandbox.upload(TASK_FILE, json.dumps(self.config.get("task"), default=str).encode())
        result.environment_setup.finished_at = _now()
        result.agent_setup = Span(_now())
        if command := agent.get("setup_command"):
            told = await self.sandbox.run(command, self._task_environment())
            if told.exit_code:
                raise RuntimeError(f"setup_command exited with {told.exit_code}: {told.output[-_SHOWN:].strip()}")
        if self._ready is not None:
            await self._ready(self.sandbox)
        result.agent_setup.finished_at = _now()

    def _task_environment(self) -> dict[str, str]:
        return {"TASK_FILE": f"{self.sandbox.working_folder}/{TASK_FILE}", "VERIFIER_DIR": self._verifier_folder()}

    def _agent_environment(self) -> dict[str, str]:
        agent = self.config.agent
        kwargs = dict(agent.get("kwargs") or {})
        address = AgentAddress(str(kwargs.get("api_base") or ""), str(kwargs.get("api_key") or ""))
        variables = {
            **(agent_variables(address) if address.url else {}),
            "AGENT_KWARGS": json.dumps(kwargs, default=str),
            "OPENAI_MODEL": str(agent.get("model_name") or "").removeprefix("openai/"),
            **self._task_environment(),
            **(agent.get("env") or {}),
        }
        if agent.get("import_path") and self.sandbox.local:
            variables["PYTHONPATH"] = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        return {name: str(value) for name, value in variables.items() if value is not None}

    def _verifier_folder(self) -> str:
        return f"{self.sandbox.working_folder}/{job_folder(self.config)}/verifier"

    async def _verify(self, ended: CommandResult) -> str | None:
        """Record the verifier's reward, else a Python agent's. Returns an error of the verifier, or None.

        A missing reward of both is not an error.
        """
        folder, told = self._verifier_folder(), None
        if command := self.config["verifier"].get("command"):
            told = await self._verifier_run(command, folder, ended.exit_code)
        try:
            reward = await self._reward(folder)
        except (ValueError, TypeError, LookupError, OSError, RecursionError, InvalidRequest) as error:
            return f"the reward in VERIFIER_DIR cannot be read: {error!r}"
        if reward is None and told is not None:
            if told.timed_out:
                return "the verifier reached its time limit"
            reward = float(told.exit_code == 0)
        self._result.verifier_result = None if reward is None else VerifierResult({"reward": reward})
        return None

    async def _verifier_run(self, command: Any, folder: str, exit_code: int) -> CommandResult:
        verifier, result = self.config["verifier"], self._result
        report = "verifier/evaluation/report.json"
        # Afterwards the folder contains only files of the verifier.
        await self.sandbox.run(["rm", "-rf", folder, report])
        await self.sandbox.run(["mkdir", "-p", f"{folder}/evaluation"])
        own = {str(name): str(value) for name, value in (verifier.get("env") or {}).items()}
        variables = {**self._task_environment(), "AGENT_EXIT_CODE": str(exit_code), **own}
        result.verifier = Span(_now())
        told = await self.sandbox.run(command, variables, _seconds(verifier, "max_timeout_sec", _VERIFIER_S))
        result.verifier.finished_at, result.verifier_output = _now(), told.output
        return told

    async def _reward(self, folder: str) -> float | None:
        """The reward in `folder`, or None. Raises ValueError, TypeError, KeyError or RecursionError for a file without
        a reward, and errors of reading it.
        """
        for name, read in (("reward.json", _reward_in_json), ("reward.txt", float)):
            try:
                reward = read(await self.sandbox.read_file(f"{folder}/{name}"))
            except FileNotFoundError:
                continue
            if not math.isfinite(reward):
                raise ValueError(f"{reward} is not a finite number")
            return reward
        return None


def job_folder(config: JobConfig) -> str:
    """The folder of a job's results, below the sandbox's working folder."""
    return f"{config['jobs_dir']}/{config.get('job_name') or 'job'}"


def agent_command(agent: Mapping[str, Any]) -> Command:
    """The command of an entry of `agents`. Raises InvalidRequest if it has none."""
    command, path = agent.get("command"), agent.get("import_path")
    if command:
        return command if isinstance(command, str) else [str(word) for word in command]
    if path:
        return ["python", "-m", "tokengrove.roll.rock.agent_process", str(path)]
    raise InvalidRequest(
        "the job's configuration has no agent: set agents[0].command (a program that calls its model at "
        "OPENAI_BASE_URL) or agents[0].import_path (a Python function) in the file of 'job_config_path', "
        "or in 'job_config'",
        param="agents",
    )


def _what_went_wrong(ended: CommandResult, agent: Mapping[str, Any]) -> str | None:
    if ended.timed_out:
        return f"the agent reached its time limit of {_seconds(agent, 'max_timeout_sec', _AGENT_S):g} s"
    if ended.exit_code == 0:
        return None
    return f"the agent exited with {ended.exit_code}: {ended.output[-_SHOWN:].strip()}"


def _reward_in_json(text: str) -> float:
    value = json.loads(text)
    return float(value["reward"] if isinstance(value, dict) else value)


def _seconds(section: Mapping[str, Any], name: str, default: float) -> float:
    value = section.get(name)
    return default if value is None else float(value)


def _now() -> datetime:
    return datetime.now(UTC)
