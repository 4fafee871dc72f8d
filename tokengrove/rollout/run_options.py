"""The options of a run: fields of one dataclass, whose names are the flags of the commands and the keys of files.

This module is apart from `tokengrove.runs` so that `tokengrove --help` does not import the client.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.option_values import flag

if TYPE_CHECKING:
    from tokengrove.client.options import SessionOptions

_WHAT, _WHERE, _HOW, _FAILURES, _SESSIONS, _RESULTS = (
    "What is played",
    "Where it is played",
    "How many",
    "Failures and limits",
    "Sessions",
    "Results",
)
EXECUTORS = ("local", "process", "ray")
_MAX_GROUP = 1000
RETRYABLE = ("agent", "timeout", "no_data", "reward", "scorer", "server", "worker")
"""The kinds of failures after which an episode can be played again: all but those of a run that was ended."""

_OWN_FIELDS = {
    "group_id": "the run names its groups",
    "group_size": "give --group-size",
    "session_id": "the run names its sessions",
    "api_key": "a key is that of one session",
    "metadata": "give --metadata",
    "sampling": "give --sampling",
    "sampling_policy": "give --sampling-policy",
    "limits": "give --limits",
}
"""Fields of `start_session` that are no entries of `session`, and why."""


def _option(panel: str, text: str, default: Any = None, **bounds: float) -> Any:
    about = {"help": text, "panel": panel, "bounds": bounds}
    return field(default=default, metadata=about)


def _mapping(panel: str, text: str) -> Any:
    """An option of names and values; as a flag NAME=VALUE, repeatable, where VALUE is JSON, else text."""
    return field(
        default_factory=dict, metadata={"help": f"{text} NAME=VALUE; repeatable.", "panel": panel, "bounds": {}}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What to play, where, how often, and what becomes of it. `checked` says what is wrong with it.

    Either `agent` (a path, `package.module:Name`) or `command` (a program with its arguments) plays. Without `data` the
    tasks are given to `run_episodes`. `folder` None keeps nothing on disk: such a run cannot be resumed.
    """

    agent: str | None = field(default=None, metadata={"help": "Class path of the agent."})
    command: tuple[str, ...] = field(default=(), metadata={"help": "Program with its arguments that is the agent."})
    agent_arg: Mapping[str, Any] = _mapping(_WHAT, "Argument of the agent's class, or option of the command:")
    data: str | None = _option(
        _WHAT, "Tasks: a .jsonl, .json, .csv or .parquet file, a folder of Harbor tasks, or package.module:tasks."
    )
    task_id_field: str | None = _option(
        _WHAT, "Field of the data that has the task's id (default: task_id, else the row's number and a hash of it)."
    )
    limit: int | None = _option(_WHAT, "Only the first tasks, this many.", min=1)
    reward: str | None = _option(_WHAT, "package.module:function that rewards an episode.")
    scorer: tuple[str, ...] = _option(_WHAT, "package.module:function that scores turns or episodes; repeatable.", ())
    success: float = _option(_WHAT, "Reward from which on an episode counts as passed, for pass@k.", 1.0)
    url: str | None = _option(_WHERE, "URL of a running server (default: start one for the run).")
    admin_key: str | None = _option(_WHERE, "Admin key of the server, if it has one.")
    executor: str = _option(_WHERE, "local (this process), process (several) or ray (a Ray cluster).", "local")
    workers: int | None = _option(_WHERE, "Processes of --executor process (default: CPU cores).", min=1)
    ray_address: str | None = _option(_WHERE, "Address of the Ray cluster (default: Ray's own rule).")
    ray_cpus: float | None = _option(_WHERE, "CPUs of a Ray worker.", min=0)
    ray_episodes: int | None = _option(_WHERE, "Episodes that a Ray worker plays at once.", min=1)
    ray_runtime_env: Mapping[str, Any] = _mapping(_WHERE, "Entry of Ray's runtime environment:")
    group_size: int = _option(_HOW, "Episodes of each task, compared with each other.", 1, min=1, max=_MAX_GROUP)
    concurrency: int = _option(_HOW, "Episodes at once.", 64, min=1)
    passes: int = _option(_HOW, "How often the data is played; each pass has groups of its own.", 1, min=1)
    seed: int | None = _option(
        _HOW, "Seed of the run: agents and sampling get one for each episode (default: agents only, drawn at random)."
    )
    timeout_s: float | None = _option(_FAILURES, "Seconds that an agent may play (default: no limit).", min=0)
    start_timeout_s: float = _option(
        _FAILURES, "Seconds that an episode waits for a full server to take its session.", 600.0, min=0
    )
    scoring_timeout_s: float = _option(
        _FAILURES, "Seconds that the reward function and the scorers may take.", 600.0, min=0
    )
    retries: int = _option(_FAILURES, "How often an episode is played again after a failure.", 2, min=0)
    retry_on: tuple[str, ...] = _option(
        _FAILURES,
        f"Failures after which it is played again: {', '.join(RETRYABLE)}; repeatable (default: server, worker).",
        ("server", "worker"),
    )
    max_failures: int = _option(
        _FAILURES, "Failed episodes that are no error (default 0): with more, the exit code is 1.", 0, min=0
    )
    max_failed_episodes: int | None = _option(
        _FAILURES,
        "Failed episodes in a row after which the run stops; -1: never (default: three groups' worth, or one more than "
        "--max-failures).",
        min=-1,
    )
    fail_fast: bool = _option(_FAILURES, "Stop as soon as more than --max-failures episodes have failed.", False)
    sampling: Mapping[str, Any] = _mapping(_SESSIONS, "Sampling of all turns (temperature, max_tokens, ...):")
    sampling_policy: str | None = _option(
        _SESSIONS, "default: requests may choose otherwise; override: --sampling holds in any case."
    )
    limits: Mapping[str, Any] = _mapping(_SESSIONS, "Limit of a session (max_turns, max_total_tokens, ...):")
    session: Mapping[str, Any] = _mapping(_SESSIONS, "Further field of start_session (discount, credit, ...):")
    metadata: Mapping[str, Any] = _mapping(_SESSIONS, "Metadata of the sessions:")
    validation: bool = field(default=False, metadata={"help": "The sessions measure the policy: never trained on."})
    folder: str | None = _option(_RESULTS, "Folder that keeps runs, each in a folder of its own.", "runs")
    name: str | None = _option(
        _RESULTS, "Name of the run (default: made of the data's name and of the options). The same name resumes it."
    )
    retry_failed: bool = _option(_RESULTS, "When a run is resumed, also play its failed episodes again.", False)
    output: str | None = _option(
        _RESULTS, "File or folder of the training samples (default: samples.* in the run's folder; eval: none)."
    )
    export_failed: bool = _option(_RESULTS, "Export the sessions of failed episodes, too.", False)
    export: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "Fields of /trajectories/export: layout, format, ..."}
    )

    def checked(self) -> RunOptions:
        """Return these options. Raises ConfigurationError that names the option which is wrong."""
        self._check_agent()
        for spec in fields(self):
            _check_bounds(spec.name, getattr(self, spec.name), spec.metadata.get("bounds", {}))
        _check_one_of("executor", self.executor, EXECUTORS)
        for kind in self.retry_on:
            _check_one_of("retry_on", kind, RETRYABLE)
        if self.sampling_policy is not None:
            _check_one_of("sampling_policy", self.sampling_policy, ("default", "override"))
        if self.max_failed_episodes == 0:
            raise ConfigurationError("--max-failed-episodes must be at least 1, or -1 for no end, not 0")
        _check_session_fields(self.session)
        self._check_executor()
        self._check_output()
        return self

    def _check_agent(self) -> None:
        if self.agent is None and not self.command:
            raise ConfigurationError(
                "nothing plays: give the agent's class path (package.module:Name), or -- and a command"
            )
        if self.agent is not None and self.command:
            raise ConfigurationError(f"give either the agent {self.agent} or the command {self.command[0]}, not both")

    def _check_executor(self) -> None:
        if self.workers is not None and self.executor != "process":
            raise ConfigurationError(f"--workers applies to --executor process, not to {self.executor}")
        for name in ("ray_address", "ray_cpus", "ray_episodes", "ray_runtime_env"):
            if getattr(self, name) not in (None, {}) and self.executor != "ray":
                raise ConfigurationError(f"{flag(name)} applies to --executor ray, not to {self.executor}")

    def _check_output(self) -> None:
        if self.folder is None and self.name is not None:
            raise ConfigurationError("--name is that of a folder in --folder, which is missing")
        if not self.exports and (self.export or self.export_failed):
            given = ", ".join([*self.export, *(["export_failed"] if self.export_failed else [])])
            raise ConfigurationError(f"nothing is exported, so {given} has no effect: give --output as well")

    @property
    def exports(self) -> bool:
        """Whether training samples are written at the end."""
        return self.output is not None or (self.folder is not None and not self.validation)

    @property
    def most_failed(self) -> int | None:
        """`max_failed_episodes`; None for the default, where `max_failures` does not allow for more."""
        from tokengrove.rollout.failure_log import GROUPS

        if self.max_failed_episodes is None and self.max_failures >= GROUPS * self.group_size:
            return self.max_failures + 1
        return self.max_failed_episodes

    def session_fields(self) -> SessionOptions:
        """The fields of `start_session` that all sessions have in common, without the metadata of the run."""
        given: dict[str, Any] = {
            **self.session,
            "sampling": dict(self.sampling),
            "limits": dict(self.limits),
            "metadata": dict(self.metadata),
            "sampling_policy": self.sampling_policy,
        }
        options: SessionOptions = {name: value for name, value in given.items() if value not in (None, {})}  # type: ignore[assignment]
        return options


def _check_bounds(name: str, value: object, bounds: Mapping[str, float]) -> None:
    if not bounds or value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigurationError(f"{flag(name)} {value!r} is not a number")
    if value < bounds.get("min", -math.inf) or value > bounds.get("max", math.inf):
        least, most = bounds.get("min"), bounds.get("max")
        told = f"at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{flag(name)} must be {told}, not {value}")


def _check_one_of(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise ConfigurationError(f"{flag(name)} must be one of {', '.join(known)}, not {value!r}")


def _check_session_fields(given: Mapping[str, Any]) -> None:
    from tokengrove.client.options import SessionOptions

    known = [name for name in SessionOptions.__annotations__ if name not in _OWN_FIELDS]
    for name in given:
        if name in _OWN_FIELDS:
            raise ConfigurationError(f"--session {name} cannot be given: {_OWN_FIELDS[name]}")
        if name not in known:
            near = get_close_matches(name, known, 1) or known
            raise ConfigurationError(f"--session {name} is no field of start_session; known: {', '.join(near)}")
