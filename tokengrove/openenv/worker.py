"""A rollout worker for OpenEnv's harness contract: for any session factory and any trainer's `generate`.

Rollouts run concurrently and independently. A failed rollout is reported, its session is closed, and the others
continue. Every session that was created is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.openenv.completion_text import message_of
from tokengrove.openenv.rollout_clock import Clock, close_session
from tokengrove.openenv.verified import reward_of
from tokengrove.rollout.contract import AgentSession, AgentSessionFactory, GenerateAPI, RolloutMessages
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.session_start import unused_session_id


@runtime_checkable
class TakesRollouts(Protocol):
    """Optional methods of a trainer's `GenerateAPI`, which the worker calls at the start and end of rollouts."""

    def start(self, rollout_id: str, task_id: str | None = None, *, group_id: str, group_size: int) -> Any: ...
    def accept(self, rollout: RolloutMessages) -> None: ...
    def fail(self, rollout_id: str, error: BaseException) -> None: ...


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout without a result. `group`: the number of its task, from 0."""

    rollout_id: str
    group: int
    task: Any
    error: Exception


class PlayedGroups(list[list[RolloutMessages]]):
    """The rollouts of each task, in order. `failed_episodes`: the number of failed rollouts, which are missing."""

    failed_episodes: int = 0


class HarnessRolloutWorker:
    """Plays tasks and returns message-level rollouts. It can be used for several runs, one at a time.

    `generate`: a `GenerateAPI`, or a function with its signature; a `TakesRollouts` also receives each rollout.
    `sampling` applies to every turn and overrides the harness's parameters; of two `max_tokens`, the smaller one
    applies. `group_size`: rollouts of each task. `concurrency`: rollouts that run at once. `timeout_s`: seconds after
    which a rollout is closed and fails. `max_turns`: turns after which a rollout is scored as it is. None: no limit. A
    rollout whose agent does not call the model fails. `on_failure` is called with each failure; `failures` lists them.
    After `max_failed_episodes` failed rollouts in a row, also across runs, the run ends with TooManyFailedEpisodes
    (default: three groups; -1: no limit).
    """

    def __init__(
        self,
        factory: AgentSessionFactory,
        generate: GenerateAPI | Callable[..., str],
        *,
        sampling: Mapping[str, Any] | None = None,
        group_size: int = 1,
        concurrency: int = 8,
        timeout_s: float | None = None,
        max_turns: int | None = None,
        name: str = "rollout",
        on_failure: Callable[[RolloutFailure], None] | None = None,
        max_failed_episodes: int | None = None,
    ) -> None:
        """Raises InvalidRequest for a number that is not positive, and for a factory that is a class."""
        if isinstance(factory, type):
            raise InvalidRequest(f"'factory' is the class {factory.__name__}; pass an instance", param="factory")
        numbers = {"group_size": group_size, "concurrency": concurrency, "timeout_s": timeout_s, "max_turns": max_turns}
        for field, value in numbers.items():
            if value is not None and value <= 0:
                raise InvalidRequest(f"{field!r} must be above 0, not {value}", param=field)
        self._factory, self._sampling, self._group_size = factory, dict(sampling or {}), group_size
        self._generate: Callable[..., str] = getattr(generate, "generate", generate)  # type: ignore[arg-type]
        self._trainer = generate if isinstance(generate, TakesRollouts) else None
        self._concurrency, self._timeout_s, self._max_turns = concurrency, timeout_s, max_turns
        self._name, self._on_failure = name, on_failure
        self._live: dict[int, AgentSession] = {}  # by identity, because sessions need not be hashable
        self._lock, self._stopped = threading.Lock(), False
        self.failures: list[RolloutFailure] = []
        self._log = FailureLog(max_failed_episodes, group_size, "a rollout")

    def run(self, tasks: Iterable[Any]) -> PlayedGroups:
        """Play all tasks; return the rollouts of each, in order. Failed rollouts are missing (see `failures`).

        Raises TooManyFailedEpisodes, as `rollouts` does.
        """
        failed = len(self.failures)
        groups: dict[int, dict[int, RolloutMessages]] = {}
        counted = _Counted(tasks)
        for group, sample, rollout in self._played(counted):
            groups.setdefault(group, {})[sample] = rollout
        found = [groups.get(number, {}) for number in range(counted.count)]
        played = PlayedGroups([group[sample] for sample in sorted(group)] for group in found)
        played.failed_episodes = len(self.failures) - failed
        return played

    def rollouts(self, tasks: Iterable[Any]) -> Iterator[RolloutMessages]:
        """Yield rollouts as they finish. Tasks are read as there is room. Leaving the loop closes running sessions."""
        for _, _, rollout in self._played(tasks):
            yield rollout

    def play(self, task: Any, rollout_id: str) -> RolloutMessages:
        """Play one rollout in this thread. Raises the error that ends it; its session is always closed."""
        session = self._factory.create(task=task, rollout_id=rollout_id)
        with self._open(session), Clock(session, self._timeout_s) as clock:
            try:
                messages = self._turns(session, rollout_id)
                reward = reward_of(session.verify())
            except Exception as error:
                raise clock.told(error) from error
            clock.check()
            return RolloutMessages(rollout_id, messages, reward)

    def fetch_training_trace(self, rollout_id: str) -> Any:
        """Return the turns of a rollout as openenv's `TrainingTrace`. Raises InvalidRequest if the trainer has none."""
        fetch = getattr(self._trainer, "fetch_training_trace", None)
        if fetch is None:
            raise InvalidRequest("'generate' stores no training traces; ServerGenerate does", param="generate")
        return fetch(rollout_id)

    def close(self) -> None:
        """Close all running sessions, whose rollouts fail. A run in progress reads no more tasks, and ends."""
        with self._lock:
            self._stopped, live = True, list(self._live.values())
        for session in live:
            close_session(session)

    def _turns(self, session: AgentSession, rollout_id: str) -> list[dict[str, Any]]:
        """Answer the harness until it ends; return the conversation of its last request with tools, else of its last
        one.
        """
        told: list[dict[str, Any]] = []
        turn, with_tools = 0, False
        while self._max_turns is None or turn < self._max_turns:
            intercept = session.next_request()
            if intercept is None:
                break
            messages, tools = intercept["messages"], intercept.get("tools") or []
            sampling = merged(intercept.get("sampling"), self._sampling)
            text = self._generate(rollout_id, turn, messages, tools, sampling)
            session.deliver(intercept, text)
            turn += 1
            if tools or not with_tools:
                told, with_tools = [*messages, message_of(text)], bool(tools)
        return told

    def _played(self, tasks: Iterable[Any]) -> Iterator[tuple[int, int, RolloutMessages]]:
        plans, running = self._plans(tasks), dict[Future[RolloutMessages], _Plan]()
        self._stopped = False
        pool = ThreadPoolExecutor(self._concurrency, thread_name_prefix="tokengrove-rollout")
        try:
            while True:
                while (
                    not self._stopped and len(running) < self._concurrency and (plan := next(plans, None)) is not None
                ):
                    running[pool.submit(self._whole, plan)] = plan
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    plan = running.pop(future)
                    if (error := future.exception()) is None:
                        self._log.note(None)
                        yield plan.group, plan.sample, future.result()
                    else:
                        self._note(RolloutFailure(plan.rollout_id, plan.group, plan.task, _exception(error)))
        finally:
            self.close()
            pool.shutdown(cancel_futures=True)
            self._stopped = False

    def _plans(self, tasks: Iterable[Any]) -> Iterator[_Plan]:
        for number, task in enumerate(tasks):
            group = unused_session_id(f"{self._name}-{number}")
            for sample in range(self._group_size):
                yield _Plan(f"{group}-{sample}", number, sample, group, task)

    def _whole(self, plan: _Plan) -> RolloutMessages:
        """Play a rollout, and report its start and end to the trainer."""
        if self._trainer is not None:
            name = f"{self._name}-{plan.group}"
            self._trainer.start(plan.rollout_id, name, group_id=plan.group_id, group_size=self._group_size)
        try:
            rollout = self.play(plan.task, plan.rollout_id)
            if not rollout.messages:
                raise AgentFailed("NoTurns", "the agent ended without calling the model")
            if self._trainer is not None:
                self._trainer.accept(rollout)
            return rollout
        except BaseException as error:
            if self._trainer is not None:
                with suppress(ProxyError):
                    self._trainer.fail(plan.rollout_id, error)
            raise

    def _note(self, failure: RolloutFailure) -> None:
        self.failures.append(failure)
        if self._on_failure is not None:
            self._on_failure(failure)
        if not self._stopped:  # otherwise the rollout failed because the worker was closed
            self._log.note(FailedEpisode.by(failure.error, f"{self._name}-{failure.group}", failure.rollout_id))

    @contextmanager
    def _open(self, session: AgentSession) -> Iterator[None]:
        with self._lock:
            self._live[id(session)] = session
            stopped = self._stopped
        try:
            if stopped:
                raise AgentFailed("closed", "the worker was closed before the rollout began")
            yield
        finally:
            with self._lock:
                del self._live[id(session)]
            close_session(session)


@dataclass(frozen=True, slots=True)
class _Plan:
    rollout_id: str
    group: int
    sample: int
    group_id: str
    task: Any


class _Counted:
    """Counts the tasks that are read."""

    def __init__(self, tasks: Iterable[Any]) -> None:
        self._tasks, self.count = tasks, 0

    def __iter__(self) -> Iterator[Any]:
        for task in self._tasks:
            self.count += 1
            yield task


def merged(asked: Mapping[str, Any] | None, own: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling of a turn: `own` overrides `asked`, and the smaller `max_tokens` applies."""
    both = {**(asked or {}), **own}
    limits = [given["max_tokens"] for given in (asked or {}, own) if given.get("max_tokens") is not None]
    return {**both, "max_tokens": min(limits)} if limits else both


def _exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
