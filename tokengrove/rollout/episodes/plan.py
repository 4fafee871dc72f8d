"""All that is needed to play one episode, in this process or in another: plans can be pickled."""

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
    """Where the sessions are started: the server's address, and its admin key if it has one."""

    url: str
    admin_key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What plays. `kind` is `path` (`target` names a Python object, `package.module:Name`) or `command` (`words` is the
    program with its arguments). `arguments` are those of the class, or the options of the command.
    """

    kind: AgentKind
    target: str = ""
    words: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """One attempt at one episode.

    `sample`: its place in the group of its task, from 0. `attempt`: from 0. `session_id` is chosen by whoever plans it,
    unused (`rollout.session_start.unused_session_id`), so that a session can be ended for a worker that died.
    `seed` depends on the run, the task and the sample only. `timeout_s`: how long the agent may run; None: no limit.
    `reward` and `scorers` name functions, by path; each call of one may take `scoring_timeout_s`. `options` are further
    fields of `start_session` (`group_id`, `group_size`, `sampling`, `limits`, ...). `validation`: the session measures
    the policy and is never trained on. `discard`: failures after which the episode is played again, so that the session
    is withdrawn (see `give_up`).
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
