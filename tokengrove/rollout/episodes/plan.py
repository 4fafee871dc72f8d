"""The plan of one episode: everything that this or another process needs to play it. Plans can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokengrove.client.options import SessionOptions
from tokengrove.rollout.episodes.result import FailureKind
from tokengrove.rollout.episodes.task import Task

AgentKind = Literal["path", "command"]


@dataclass(frozen=True, slots=True)
class Server:
    """The server of the sessions: its address, and its admin key if it has one."""

    url: str
    admin_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """The agent that plays. `kind` is `path` or `command`.

    `target`, for `path`: a Python object (`package.module:Name`), a gem environment (`gem:NAME`) or the name of a
    registered verl loop. `words`, for `command`: the program with its arguments. `arguments`: the arguments of the
    agent, or the options of the command.
    """

    kind: AgentKind
    target: str = ""
    words: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One attempt at one episode.

    `sample`: the index in the group of its task, from 0. `attempt`: from 0. `session_id`: a new id
    (`rollout.session_start.unused_session_id`) that the planner chooses, so that it can end the session of a worker
    that died. `seed` depends only on the run, the task and the sample. `timeout_s`: seconds that the agent may play;
    None: no limit. `start_timeout_s`: seconds to wait for a place on a full server. `reward` and `scorers`: paths of
    functions; each call may take `scoring_timeout_s` seconds. `options`: further fields of `start_session` (`group_id`,
    `group_size`, `sampling`, `limits`, ...). `validation`: the session measures the policy and is never trained on.
    `discard`: failures after which the episode is retried, so the session is withdrawn (see `give_up`).
    """

    task: Task
    sample: int
    attempt: int
    server: Server
    agent: AgentSpec
    session_id: str
    seed: int = 0
    timeout_s: float | None = None
    start_timeout_s: float = 600.0
    reward: str | None = None
    scorers: tuple[str, ...] = ()
    scoring_timeout_s: float | None = 600.0
    options: SessionOptions = field(default_factory=SessionOptions)
    validation: bool = False
    discard: frozenset[FailureKind] = frozenset()
