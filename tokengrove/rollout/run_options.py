"""The options of a run: fields of a dataclass whose names are the flags of the commands and the keys of files.

This module is separate from `tokengrove.runs`, so that `tokengrove --help` does not import the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from tokengrove.errors import ConfigurationError
from tokengrove.options.option import flag_of, option, options_of

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
"""The kinds of failures after which an episode can be retried: all except `cancelled`."""

_OWN_FIELDS = {
    "group_id": "the run names its groups",
    "group_size": "give --group-size",
    "session_id": "the run names its sessions",
    "api_key": "a key belongs to one session",
    "metadata": "give --metadata",
    "sampling": "give --sampling",
    "sampling_policy": "give --sampling-policy",
    "limits": "give --limits",
}
"""Fields of `start_session` that `session` must not contain, and the reason or the option to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run plays, where and how often, and its results. `checked` validates the options.

    Either `agent` (a path, `package.module:Name`) or `command` (a program with its arguments) plays. Without `data`,
    the tasks are passed to `run_episodes`. With `folder` None, the run stores nothing on disk and cannot be resumed.
    """

    agent: str | None = option(None, "Class path of the agent.")
    command: tuple[str, ...] = option((), "Program with its arguments that is the agent.")
    agent_arg: Mapping[str, Any] = option({}, "Argument of the agent's class, or option of the command.", panel=_WHAT)
    data: str | None = option(
        None,
        "Tasks: a .jsonl, .json, .csv or .parquet file, a folder of Harbor tasks, or package.module:tasks.",
        panel=_WHAT,
    )
    task_id_field: str | None = option(
        None,
        "Field of the data with the task's id.",
        panel=_WHAT,
        otherwise="task_id, else the row's number and a hash of it",
    )
    limit: int | None = option(None, "Only the first tasks, this many.", panel=_WHAT, least=1)
    reward: str | None = option(None, "package.module:function that rewards an episode.", panel=_WHAT)
    scorer: tuple[str, ...] = option((), "package.module:function that scores turns or episodes.", panel=_WHAT)
    success: float = option(1.0, "Least reward of an episode that counts as passed, for pass@k.", panel=_WHAT)
    url: str | None = option(None, "URL of a running server.", panel=_WHERE, otherwise="start one for the run")
    admin_key: str | None = option(None, "Admin key of the server, if it has one.", panel=_WHERE)
    executor: str = option(
        "local",
        "local (this process), process (several processes) or ray (a Ray cluster).",
        panel=_WHERE,
        choices=EXECUTORS,
    )
    workers: int | None = option(None, "Processes of --executor process.", panel=_WHERE, least=1, otherwise="CPU cores")
    ray_address: str | None = option(None, "Address of the Ray cluster.", panel=_WHERE, otherwise="Ray's default")
    ray_cpus: float | None = option(None, "CPUs of a Ray worker.", panel=_WHERE, least=0)
    ray_episodes: int | None = option(None, "Episodes that a Ray worker plays at once.", panel=_WHERE, least=1)
    ray_runtime_env: Mapping[str, Any] = option({}, "Entry of Ray's runtime environment.", panel=_WHERE)
    group_size: int = option(
        1, "Episodes of each task, compared with each other.", panel=_HOW, least=1, most=_MAX_GROUP
    )
    concurrency: int = option(64, "Episodes at once.", panel=_HOW, least=1)
    passes: int = option(1, "How often the data is played; each pass has its own groups.", panel=_HOW, least=1)
    seed: int | None = option(
        None,
        "Seed of the run: agents and sampling get one for each episode.",
        panel=_HOW,
        otherwise="agents only, drawn at random",
    )
    timeout_s: float | None = option(
        None, "Seconds that an agent may play.", panel=_FAILURES, least=0, otherwise="no limit"
    )
    start_timeout_s: float = option(
        600.0, "Seconds that an episode waits for a place on a full server.", panel=_FAILURES, least=0
    )
    scoring_timeout_s: float = option(
        600.0, "Seconds that the reward function and the scorers may take.", panel=_FAILURES, least=0
    )
    retries: int = option(2, "How often an episode is retried after a failure.", panel=_FAILURES, least=0)
    retry_on: tuple[str, ...] = option(
        ("server", "worker"),
        "Failures after which an episode is retried.",
        panel=_FAILURES,
        choices=RETRYABLE,
        otherwise="server, worker",
    )
    max_failures: int = option(
        0, "Failed episodes that are accepted; with more, the exit code is 1.", panel=_FAILURES, least=0
    )
    max_failed_episodes: int | None = option(
        None,
        "Failed episodes in a row after which the run stops; -1: never.",
        panel=_FAILURES,
        least=-1,
        otherwise="the episodes of three groups, or one more than --max-failures",
    )
    fail_fast: bool = option(False, "Stop as soon as more than --max-failures episodes have failed.", panel=_FAILURES)
    sampling: Mapping[str, Any] = option({}, "Sampling of all turns (temperature, max_tokens, ...).", panel=_SESSIONS)
    sampling_policy: str | None = option(
        None,
        "default: requests may set their own values; override: --sampling always applies.",
        panel=_SESSIONS,
        choices=("default", "override"),
    )
    limits: Mapping[str, Any] = option({}, "Limit of a session (max_turns, max_total_tokens, ...).", panel=_SESSIONS)
    session: Mapping[str, Any] = option({}, "Further field of start_session (discount, credit, ...).", panel=_SESSIONS)
    metadata: Mapping[str, Any] = option({}, "Metadata of the sessions.", panel=_SESSIONS)
    validation: bool = option(False, "The sessions measure the policy and are never trained on.")
    folder: str | None = option("runs", "Folder for runs, each in its own folder.", panel=_RESULTS)
    name: str | None = option(
        None,
        "Name of the run. A run with the same name is resumed.",
        panel=_RESULTS,
        otherwise="derived from the data's name and the options",
    )
    retry_failed: bool = option(False, "When a run is resumed, also retry its failed episodes.", panel=_RESULTS)
    output: str | None = option(
        None,
        "File or folder for the training samples.",
        panel=_RESULTS,
        otherwise="samples.* in the run's folder; eval: none",
    )
    export_failed: bool = option(False, "Also export the sessions of failed episodes.", panel=_RESULTS)
    export: Mapping[str, Any] = option({}, "Fields of /trajectories/export: layout, format, ...")

    def checked(self) -> RunOptions:
        """Return these options. Raises ConfigurationError, which names the wrong option."""
        self._check_agent()
        for name, each in options_of(RunOptions).items():
            each.check(getattr(self, name))
        if self.max_failed_episodes == 0:
            raise ConfigurationError("--max-failed-episodes must be at least 1, or -1 for no limit, not 0")
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
                raise ConfigurationError(f"{flag_of(name)} applies to --executor ray, not to {self.executor}")

    def _check_output(self) -> None:
        if self.folder is None and self.name is not None:
            raise ConfigurationError("--name needs --folder")
        if not self.exports and (self.export or self.export_failed):
            given = ", ".join([*self.export, *(["export_failed"] if self.export_failed else [])])
            raise ConfigurationError(f"nothing is exported, so {given} has no effect: give --output")

    @property
    def exports(self) -> bool:
        """Whether the run writes training samples at its end."""
        return self.output is not None or (self.folder is not None and not self.validation)

    @property
    def most_failed(self) -> int | None:
        """The limit of failed episodes in a row; None: the default of three groups.

        It is `max_failed_episodes`, or by default `max_failures` + 1 if `max_failures` reaches the default limit.
        """
        from tokengrove.rollout.failure_log import GROUPS

        if self.max_failed_episodes is None and self.max_failures >= GROUPS * self.group_size:
            return self.max_failures + 1
        return self.max_failed_episodes

    def session_fields(self) -> SessionOptions:
        """The fields of `start_session` that all sessions share, without metadata that the run adds."""
        given: dict[str, Any] = {
            **self.session,
            "sampling": dict(self.sampling),
            "limits": dict(self.limits),
            "metadata": dict(self.metadata),
            "sampling_policy": self.sampling_policy,
        }
        options: SessionOptions = {name: value for name, value in given.items() if value not in (None, {})}  # type: ignore[assignment]
        return options


def _check_session_fields(given: Mapping[str, Any]) -> None:
    from tokengrove.client.options import SessionOptions

    known = [name for name in SessionOptions.__annotations__ if name not in _OWN_FIELDS]
    for name in given:
        if name in _OWN_FIELDS:
            raise ConfigurationError(f"--session {name} cannot be given: {_OWN_FIELDS[name]}")
        if name not in known:
            near = get_close_matches(name, known, 1) or known
            raise ConfigurationError(f"--session {name} is not a field of start_session; known: {', '.join(near)}")
