"""Where episodes run: options from flags and configuration files, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tokengrove.errors import ConfigurationError

ExecutorKind = Literal["local", "process", "ray"]


@dataclass(frozen=True, slots=True)
class RayOptions:
    """How Ray is used. Each Ray worker plays `episodes_per_worker` episodes at once and reserves `num_cpus` cores.

    `address`: the address of the cluster: `HOST:6379`, `ray://HOST:10001`, `auto`, or `local` for a cluster on this
    machine that is started for the run; None: RAY_ADDRESS, else a running cluster on this machine, which must exist.
    `runtime_env`: Ray's runtime environment. Workers look for modules in the same folders as this program; machines
    without these folders get them by `working_dir` or `py_modules`.
    """

    address: str | None = None
    num_cpus: float = 1.0
    episodes_per_worker: int = 16
    runtime_env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.num_cpus >= 0:
            raise ConfigurationError(f"--ray-cpus is {self.num_cpus!r}; it must be at least 0")
        if self.episodes_per_worker < 1:
            raise ConfigurationError(f"--ray-episodes is {self.episodes_per_worker!r}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """`concurrency`: episodes at once, in total. `workers`: processes of kind `process`; default: one per core.

    Raises ConfigurationError, which names the flag, for invalid options.
    """

    kind: ExecutorKind = "local"
    concurrency: int = 64
    workers: int | None = None
    ray: RayOptions | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(ExecutorKind):
            raise ConfigurationError(
                f"--executor is {self.kind!r}; it must be one of {', '.join(get_args(ExecutorKind))}"
            )
        if self.concurrency < 1:
            raise ConfigurationError(f"--concurrency is {self.concurrency!r}; it must be at least 1")
        if self.workers is not None and self.workers < 1:
            raise ConfigurationError(f"--workers is {self.workers!r}; it must be at least 1")
        if self.workers is not None and self.kind != "process":
            raise ConfigurationError(f"--workers applies to --executor process; this is --executor {self.kind}")
        if self.ray is not None and self.kind != "ray":
            raise ConfigurationError(f"the options of Ray apply to --executor ray; this is --executor {self.kind}")

    @property
    def processes(self) -> int:
        """The number of processes of kind `process`."""
        return min(self.concurrency, self.workers or _cores())


def _cores() -> int:
    """The number of cores that this program may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
