"""One episode of a Harbor task: its environment, and for each stage the agent and the tests.

The environment is removed at the end. The agent sees neither tests nor solution, and the tests see no key of the
session.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import EpisodeEnded, RewardFailed
from tokengrove.rollout.harbor.harbor_sandbox import (
    AGENT_LOGS,
    ARTIFACTS,
    TESTS,
    VERIFIER_LOGS,
    Blueprint,
    HarborSandbox,
)
from tokengrove.rollout.harbor.options import HarborOptions
from tokengrove.rollout.harbor.task_config import Artifact, Environment, Healthcheck
from tokengrove.rollout.harbor.task_folder import BadTask, Stage, TaskFolder
from tokengrove.rollout.harbor.variables import resolved
from tokengrove.rollout.harbor.verification import rewards

_SHOWN = 500
_log = logging.getLogger(__name__)
MakeSandbox = Callable[[Blueprint], HarborSandbox]
Work = Callable[[Stage, HarborSandbox, float | None], Awaitable[EpisodeEnded | None]]
"""Works on a stage until it is done or the given seconds are over (None: no limit); returns its failure, or None."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial of a task; call `play` once. `name`: the name of its folder in `keep_output`."""

    task: TaskFolder
    name: str
    work: Work
    options: HarborOptions
    make_sandbox: MakeSandbox

    async def play(self) -> dict[str, float]:
        """Play all stages and return the rewards by name.

        With several steps, they are the means over the played steps, or the rewards of the last played step
        (`multi_step_reward_strategy`). Raises RewardFailed if tests gave no reward, BadTask, ConfigurationError or
        RuntimeError if the environment cannot be made, and EpisodeEnded if it is not ready in time or, with `strict`,
        if the agent failed.
        """
        config = self.task.config
        found: list[dict[str, float]] = []
        async with _Place(self._blueprint(config.environment, self.task.environment), self) as sandbox:
            for number, stage in enumerate(self.task.stages):
                await self._prepare(number, stage, sandbox)
                found.append(await self._stage(stage, sandbox, last=number == len(self.task.stages) - 1))
                if not _reaches(found[-1], stage):
                    break
        return found[-1] if config.multi_step_reward_strategy == "final" else _means(found)

    async def _prepare(self, number: int, stage: Stage, sandbox: HarborSandbox) -> None:
        """Copy the files of a step and run its setup, after files of the previous step's tests have been removed."""
        if number:
            await sandbox.empty(AGENT_LOGS, VERIFIER_LOGS, TESTS, ARTIFACTS)
        if stage.step is None:
            return
        workdir = self.task.folder / "steps" / stage.step.name / "workdir"
        sandbox.user = self._agent_user(stage)
        if _is_dir(workdir):
            await sandbox.put([(workdir, sandbox.working_folder)])
        if _is_file(workdir / "setup.sh"):
            told = await sandbox.run(["bash", f"{sandbox.working_folder}/setup.sh"])
            if told.exit_code:
                raise BadTask(f"{workdir / 'setup.sh'} exited with {told.exit_code}: {told.output[-_SHOWN:].strip()}")
        if stage.step.healthcheck is not None:
            await healthy(sandbox, stage.step.healthcheck)

    async def _stage(self, stage: Stage, sandbox: HarborSandbox, last: bool) -> dict[str, float]:
        sandbox.user = self._agent_user(stage)
        limit_s = None if stage.agent_timeout_s is None else stage.agent_timeout_s * self.options.timeout_multiplier
        problem = await self.work(stage, sandbox, limit_s)
        if problem is not None:
            if self.options.strict:
                raise problem
            _log.info("%s: %s; the tests decide", self.name, problem)
        if self.options.kill_before_tests:
            await sandbox.kill_all()
        with TemporaryDirectory(prefix="tokengrove-harbor-") as scratch:
            folder = self._kept(stage) or Path(scratch)
            try:
                await self._collect(stage, sandbox, folder)
                return await self._verify(stage, sandbox, folder, last)
            except RewardFailed as error:
                raise RewardFailed(f"{error} (before, {problem})" if problem else str(error)) from None

    async def _collect(self, stage: Stage, sandbox: HarborSandbox, folder: Path) -> None:
        """Run the `collect` commands. Keep the agent's logs and artifacts for `keep_output` or a separate verifier.

        Missing files are omitted, as in Harbor.
        """
        sandbox.user = None
        for hook in [*self.task.config.verifier.collect, *(stage.step.verifier.collect if stage.step else ())]:
            await sandbox.run(hook.command, timeout_s=hook.timeout_sec)
        if not stage.separate and self.options.command.keep_output is None:
            return
        await _kept(sandbox, AGENT_LOGS, folder / "agent", ())
        for artifact in _artifacts(stage):
            await _kept(sandbox, artifact.source, _place(folder, artifact), artifact.exclude)

    async def _verify(self, stage: Stage, sandbox: HarborSandbox, folder: Path, last: bool) -> dict[str, float]:
        limit_s = stage.verifier_timeout_s * self.options.timeout_multiplier
        output = folder / "verifier"
        if not stage.separate:
            sandbox.user = self._verifier_user(stage)
            return await rewards(stage, sandbox, upload=True, limit_s=limit_s, output=output)
        if last:
            await sandbox.stop()
        table, build = self.task.verifier_environment(stage)
        async with _Place(self._blueprint(table, build), self) as separate:
            for artifact in _artifacts(stage):
                await _brought(separate, artifact, _place(folder, artifact))
            separate.user = self._verifier_user(stage)
            own = build != self.task.environment
            return await rewards(stage, separate, upload=not own, limit_s=limit_s, output=output)

    def _blueprint(self, table: Environment, build: Path) -> Blueprint:
        return Blueprint(table, build, resolved(table.env, "environment"), self.task.folder)

    def _kept(self, stage: Stage) -> Path | None:
        folder = self.options.command.keep_output
        return None if folder is None else trial_folder(folder, self.name, stage)

    def _agent_user(self, stage: Stage) -> str | int | None:
        own = stage.step.agent.user if stage.step else None
        return self.task.config.agent.user if own is None else own

    def _verifier_user(self, stage: Stage) -> str | int | None:
        own = stage.step.verifier.user if stage.step else None
        return self.task.config.verifier.user if own is None else own


def trial_folder(folder: str, name: str, stage: Stage) -> Path:
    """The folder for the files of one stage of a trial."""
    trial = Path(folder).expanduser() / name
    return trial if stage.name is None else trial / "steps" / stage.name


class _Place:
    """An environment for a block: it is started within its time limit, checked, and removed at the end."""

    def __init__(self, blueprint: Blueprint, trial: Trial) -> None:
        self._blueprint = blueprint
        self._limit_s = blueprint.table.build_timeout_sec * trial.options.timeout_multiplier
        self._sandbox = trial.make_sandbox(blueprint)

    async def __aenter__(self) -> HarborSandbox:
        try:
            async with asyncio.timeout(self._limit_s) as limit:
                await self._sandbox.start()
            if self._blueprint.table.healthcheck is not None:
                await healthy(self._sandbox, self._blueprint.table.healthcheck)
        except BaseException as error:
            await to_the_end(self._sandbox.stop())
            if isinstance(error, TimeoutError) and limit.expired():
                raise EpisodeEnded("Failed", f"the environment is not ready after {self._limit_s:g} s") from None
            raise
        return self._sandbox

    async def __aexit__(self, *_: object) -> None:
        await to_the_end(self._sandbox.stop())


async def healthy(
    sandbox: HarborSandbox, check: Healthcheck, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> None:
    """Wait until a command exits with 0. Raises BadTask after `retries` failures, without those in the start period."""
    begun, failures = time.monotonic(), 0
    while True:
        early = time.monotonic() < begun + check.start_period_sec
        if (await sandbox.run(check.command, timeout_s=check.timeout_sec)).exit_code == 0:
            return
        failures += not early
        if failures >= max(check.retries, 1):
            raise BadTask(f"healthcheck: {check.command!r} has failed {failures} times")
        await sleep(check.start_interval_sec if early else check.interval_sec)


def _artifacts(stage: Stage) -> list[Artifact]:
    """The artifacts of the stage, and the folder in which agents publish artifacts."""
    named = list(stage.artifacts)
    if not any(each.source.rstrip("/") == ARTIFACTS for each in named):
        named.insert(0, Artifact(source=ARTIFACTS))
    return named


def _place(folder: Path, artifact: Artifact) -> Path:
    """The path of an artifact in `folder`/artifacts: its `destination`, or its path in the environment."""
    return folder / "artifacts" / (artifact.destination or artifact.source.strip("/"))


async def _kept(sandbox: HarborSandbox, source: str, target: Path, exclude: tuple[str, ...] | list[str]) -> None:
    try:
        await sandbox.get(source, target, exclude)
    except (FileNotFoundError, ValueError, RuntimeError) as error:
        _log.info("%s of the environment is not kept: %s", source, error)


async def _brought(sandbox: HarborSandbox, artifact: Artifact, kept: Path) -> None:
    """Copy an artifact to its original path in another environment."""
    if _is_dir(kept):
        await sandbox.empty(artifact.source)
    if kept.exists():  # noqa: ASYNC240 a look at a folder of this machine
        await sandbox.put([(kept, artifact.source)])


def _is_dir(path: Path) -> bool:
    return path.is_dir()


def _is_file(path: Path) -> bool:
    return path.is_file()


def _reaches(found: Mapping[str, float], stage: Stage) -> bool:
    """Whether the rewards suffice for the next step."""
    least = stage.step.min_reward if stage.step else None
    if least is None:
        return True
    wanted = least if isinstance(least, dict) else {"reward": least}
    return all(found.get(name, float("-inf")) >= value for name, value in wanted.items())


def _means(found: list[dict[str, float]]) -> dict[str, float]:
    """The mean of each value over the played steps; a missing value counts as 0."""
    names = dict.fromkeys(name for each in found for name in each)
    return {name: sum(each.get(name, 0.0) for each in found) / len(found) for name in names}
