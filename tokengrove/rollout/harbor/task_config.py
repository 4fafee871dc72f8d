"""The fields of `task.toml`, in Harbor's schema 1.0 to 1.4, with the rules of Harbor's own reader.

A field of another type, or a value that Harbor refuses, is an error. Unknown fields are kept, so that they can be
reported.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

_PACKAGE = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*\Z")
_NO_FILE_NAME = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f]')
_SIZES = {"K": 1 / 1024, "M": 1, "G": 1024}

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NetworkMode = Literal["no-network", "public", "allowlist"]


class Section(BaseModel):
    """A table of the file. Unknown fields are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """The names of the unknown fields of this table and the tables in it."""
        yield from (f"{prefix}{name}" for name in self.model_extra or {})
        for name in type(self).model_fields:
            value = getattr(self, name)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, Section):
                    yield from each.unknown(f"{prefix}{name}.")


class Healthcheck(Section):
    """A command that must exit with 0 before the agent starts. Times are in seconds."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: Seconds = 0.0
    start_interval_sec: Seconds = 5.0
    retries: int = 3


def _megabytes(value: Any) -> Any:
    """Convert the sizes of older files, such as `4G`, `512M` and `1024K`, to MiB."""
    text = str(value).strip().upper()
    number, unit = text[:-1], text[-1:]
    try:
        return int(float(number) * _SIZES[unit])
    except (KeyError, ValueError):
        raise ValueError(f"{value!r} is not a size such as 4G, 512M or 1024K") from None


class Environment(Section):
    """The environment of a task. Sizes are in MiB.

    `env` may contain `${NAME}` and `${NAME:-default}` for variables of the caller.
    """

    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux", "windows"], BeforeValidator(lambda v: v.lower() if isinstance(v, str) else v)] = (
        "linux"
    )
    cpus: int | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = Field(default_factory=list)
    env: dict[str, str] = Field(default_factory=dict)
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    network_mode: NetworkMode = "public"
    allowed_hosts: list[str] | None = None

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old in ("memory", "storage"):
            if (value := data.pop(old, None)) is not None:
                size = _megabytes(value)
                if data.setdefault(f"{old}_mb", size) != size:
                    raise ValueError(f"{old} = {value!r} and {old}_mb = {data[f'{old}_mb']!r} contradict each other")
        allow = data.pop("allow_internet", None)
        if allow is not None and "network_mode" not in data and data.get("allowed_hosts") is None:
            data["network_mode"] = "public" if allow else "no-network"
        return data

    @model_validator(mode="after")
    def _hosts(self) -> Self:
        _hosts_fit(self.allowed_hosts, self.network_mode)
        return self


class Agent(Section):
    """`timeout_sec`: seconds that the agent may run; None: no limit."""

    timeout_sec: Seconds | None = None
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None

    @model_validator(mode="after")
    def _hosts(self) -> Self:
        _hosts_fit(self.allowed_hosts, self.network_mode)
        return self


class Collect(Section):
    """A command that runs after the agent; the verifier gets its files as artifacts."""

    command: str
    service: str = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class Verifier(Section):
    """A missing `environment_mode` means separate if there is an `environment`, else the task's mode, else shared."""

    timeout_sec: Seconds = 600.0
    env: dict[str, str] = Field(default_factory=dict)
    user: str | int | None = None
    network_mode: NetworkMode | None = None
    allowed_hosts: list[str] | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: Environment | None = None
    collect: list[Collect] = Field(default_factory=list)

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode that this table sets, without an inherited mode."""
        return self.environment_mode or (None if self.environment is None else "separate")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.environment_mode == "shared" and self.environment is not None:
            raise ValueError("environment_mode = 'shared' contradicts [verifier.environment]; leave out one of them")
        _hosts_fit(self.allowed_hosts, self.network_mode)
        return self


def _hosts_fit(hosts: list[str] | None, mode: str | None) -> None:
    if hosts and mode != "allowlist":
        raise ValueError("allowed_hosts needs network_mode = 'allowlist'")


def _inside(source: str) -> str:
    if ".." in PurePosixPath(source).parts:
        raise ValueError(f"{source!r} must not contain '..'")
    return source


class Artifact(Section):
    """A file or folder of the environment that is kept. `destination`: a path below the folder of the artifacts."""

    source: Annotated[str, AfterValidator(_inside)]
    destination: str | None = None
    exclude: list[str] = Field(default_factory=list)
    service: str | None = None

    @field_validator("destination")
    @classmethod
    def _relative(cls, value: str | None) -> str | None:
        if value and (PurePosixPath(value).is_absolute() or ".." in PurePosixPath(value).parts or "\\" in value):
            raise ValueError(f"{value!r} must be a path below the folder of the artifacts")
        return value or None


def _as_artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


Artifacts = list[Annotated[Artifact, BeforeValidator(_as_artifact)]]


def _step_name(name: str) -> str:
    if not name.strip() or name in (".", "..") or name.endswith((".", " ")) or _NO_FILE_NAME.search(name):
        raise ValueError(f"{name!r} cannot be the name of a folder")
    return name


class Step(Section):
    """One of several steps. `min_reward`: the least reward, or rewards by name, for the next step to be played."""

    name: Annotated[str, AfterValidator(_step_name)]
    agent: Agent = Field(default_factory=Agent)
    verifier: Verifier = Field(default_factory=Verifier)
    min_reward: float | dict[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = Field(default_factory=list)


class Package(Section):
    """[task]: the name of the task in a registry, `organisation/name`."""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[dict[str, Any]] = Field(default_factory=list)
    keywords: list[str] = Field(default_factory=list)

    @field_validator("name")
    @classmethod
    def _organisation(cls, value: str) -> str:
        if not _PACKAGE.match(value) or ".." in value:
            raise ValueError(f"{value!r} must have the form organisation/name")
        return value


class Solution(Section):
    """[solution]: the variables of `solve.sh`."""

    env: dict[str, str] = Field(default_factory=dict)


class TaskConfig(Section):
    """The whole file."""

    schema_version: str = "1.4"
    task: Package | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    verifier: Verifier = Field(default_factory=Verifier)
    agent: Agent = Field(default_factory=Agent)
    environment: Environment = Field(default_factory=Environment)
    solution: Solution = Field(default_factory=Solution)
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    steps: list[Step] = Field(default_factory=list)
    artifacts: Artifacts = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _older(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = dict(data)
            data.setdefault("schema_version", data.pop("version"))
        return data

    @field_validator("steps")
    @classmethod
    def _different(cls, steps: list[Step]) -> list[Step]:
        seen: set[str] = set()
        for step in steps:
            key = unicodedata.normalize("NFC", step.name).casefold()
            if key in seen:
                raise ValueError(f"two steps have the name {step.name!r}")
            seen.add(key)
        return steps
