"""A folder with a Harbor task: `task.toml`, `instruction.md`, `environment/`, `tests/`, `solution/`, `steps/`.

A task that was read is complete: all files that a run of the task needs exist in its folder.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic import ValidationError

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.harbor.task_config import Artifact, Environment, Step, TaskConfig

CONFIG, INSTRUCTION = "task.toml", "instruction.md"
_CANARY = re.compile(r"(<!--.*canary.*-->|#.*canary.*)\Z", re.IGNORECASE)


class BadTask(ConfigurationError):
    """A folder is not a task that can be run. The message names the file and the field."""


@dataclass(frozen=True, slots=True)
class Stage:
    """An instruction and its verification: the whole task (`name` is None), or one of its steps.

    `tests`: the folders with the files of the verifier, of which later folders overwrite earlier ones; one of them has
    `test.sh`. Times are in seconds; None: no limit. `separate`: the verifier runs in its own environment.
    """

    name: str | None
    instruction: str
    tests: tuple[Path, ...]
    solution: Path | None
    agent_timeout_s: float | None
    verifier_timeout_s: float
    verifier_env: dict[str, str]
    artifacts: tuple[Artifact, ...]
    separate: bool
    step: Step | None = None


class TaskFolder:
    """A task. `name`: the name in `[task]`, otherwise the folder's name."""

    def __init__(self, folder: Path) -> None:
        """Read the task. Raises BadTask."""
        self.folder = folder.resolve()
        self.config = _config(self.folder)
        self.name = self.config.task.name if self.config.task else self.folder.name
        for part in ("environment", "tests", "solution", "steps"):
            _all_inside(self.folder / part, self.folder)
        self.stages = tuple(self._stages())

    @property
    def environment(self) -> Path:
        """The folder from which the environment is built; with a ready-made image, it need not exist."""
        return self.folder / "environment"

    @cached_property
    def instruction(self) -> str:
        """The instruction of the first stage."""
        return self.stages[0].instruction

    def verifier_environment(self, stage: Stage) -> tuple[Environment, Path]:
        """The table and the folder with the Dockerfile of a separate verifier's environment.

        A verifier's own Dockerfile or image contains the tests; without one, the agent's environment is built again.
        """
        tables = [(self.config.verifier.environment, self.folder / "tests")]
        if stage.step is not None:
            tables.insert(0, (stage.step.verifier.environment, self.folder / "steps" / stage.step.name / "tests"))
        table = next((table for table, _ in tables if table is not None), self.config.environment)
        for own, folder in tables:
            if (own is not None and own.docker_image) or has_build(folder):
                return table, folder
        return table, self.environment

    def _stages(self) -> Iterator[Stage]:
        if not self.config.steps:
            yield self._stage(None, self.folder)
        for step in self.config.steps:
            yield self._stage(step, self.folder / "steps" / step.name)

    def _stage(self, step: Step | None, folder: Path) -> Stage:
        """Read a stage from `folder`. The task's solution and settings are used where the step has none."""
        task = self.config
        agent, verifier = (task.agent, task.verifier) if step is None else (step.agent, step.verifier)
        separate = (verifier.mode or task.verifier.mode or "shared") == "separate"
        stage = Stage(
            name=None if step is None else step.name,
            instruction=_instruction(folder),
            tests=tuple(path for path in dict.fromkeys((self.folder / "tests", folder / "tests")) if path.is_dir()),
            solution=_first(folder / "solution", self.folder / "solution"),
            agent_timeout_s=task.agent.timeout_sec if agent.timeout_sec is None else agent.timeout_sec,
            verifier_timeout_s=verifier.timeout_sec,
            verifier_env={**task.verifier.env, **verifier.env},
            artifacts=(*task.artifacts, *(step.artifacts if step else ())),
            separate=separate,
            step=step,
        )
        self._complete(stage, folder)
        return stage

    def _complete(self, stage: Stage, folder: Path) -> None:
        if self.config.environment.os == "windows":
            return  # refused before it is run; its files end with .bat
        own_tests = stage.separate and self.verifier_environment(stage)[1] != self.environment
        if not own_tests and not any((tests / "test.sh").is_file() for tests in stage.tests):
            raise BadTask(f"{folder / 'tests' / 'test.sh'} is missing: it gives the task its reward")


def has_build(folder: Path) -> bool:
    """Whether a folder has a Dockerfile or docker-compose.yaml."""
    return any((folder / name).is_file() for name in ("Dockerfile", "docker-compose.yaml"))


def _config(folder: Path) -> TaskConfig:
    file = folder / CONFIG
    try:
        return TaskConfig.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise BadTask(f"{file} is missing; a Harbor task is a folder with {CONFIG} and {INSTRUCTION}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise BadTask(f"{file}: {error}") from None
    except RecursionError:
        raise BadTask(f"{file} is nested too deeply") from None
    except ValidationError as error:
        told = "; ".join(f"{_field(each['loc'])}: {_text(each['msg'])}" for each in error.errors(include_url=False))
        raise BadTask(f"{file}: {told}") from None


def _field(location: tuple[str | int, ...]) -> str:
    return ".".join(str(part) for part in location) or "the file"


def _text(message: str) -> str:
    return message.removeprefix("Value error, ")


def _instruction(folder: Path) -> str:
    file = folder / INSTRUCTION
    try:
        return without_canary(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BadTask(f"{file} is missing: it is the agent's instruction") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadTask(f"{file}: {error}") from None


def without_canary(text: str) -> str:
    """Remove the canary lines of a benchmark at the beginning, as Harbor does, and the empty lines after them."""
    lines = text.split("\n")
    first = 0
    while first < len(lines) and _CANARY.match(lines[first].strip()):
        first += 1
    while first < len(lines) and not lines[first].strip():
        first += 1
    return "\n".join(lines[first:])


def _first(*folders: Path) -> Path | None:
    """The first folder that has a `solve.sh`; None if none has."""
    for folder in folders:
        if (folder / "solve.sh").is_file():
            return folder
    return None


def _all_inside(path: Path, root: Path) -> None:
    """Raise BadTask for a link out of the task's folder, which would copy other local files into the environment."""
    for each in [path, *path.rglob("*")]:
        if each.is_symlink() and not each.resolve().is_relative_to(root):
            raise BadTask(f"{each} leads out of the task's folder, to {each.resolve()}")
