"""A scorer: a function with a name, called for each turn or once for a trajectory.

Its arguments, by the names of its parameters; the first parameter may have any name:

| parameter | for a turn | for a trajectory |
|---|---|---|
| `turn`, or the first one | the turn (`Turn`) | |
| `trajectory`, or the first one | the trajectory (only by its name) | the trajectory (`Trajectory`) |
| `messages` | of the request | the conversation that ends with the last turn, including its reply |
| `output` | the text of the reply | the text of the last reply |
| `reply`, `tool_calls`, `interaction_id`, `index` | of the turn | |
| `next_messages` | what was sent after the reply; called only once there is something | |
| `turns`, `interaction_ids` | | all complete turns, and their ids |
| `reward`, `rewards` | the main reward and the named rewards of the turn | their sums over the turns |
| `task` or `data`, `session_id`, `session` | the row of the data, and the session | the same |
| `client` | the `AsyncClient` with the admin key, for coroutine functions | the same |
| any other name | the field of the row with this name | the same |
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar, cast, overload
from weakref import WeakKeyDictionary

from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.function_calls import call_within
from tokengrove.rollout.imports import load
from tokengrove.rollout.named_arguments import parameters, unknown, wanted
from tokengrove.rollout.returned_rewards import number
from tokengrove.rollout.trajectory import Trajectory, Turn

Per = Literal["turn", "trajectory"]
F = TypeVar("F", bound=Callable[..., Any])
CONCURRENCY = 16
"""The default number of concurrent calls of one scorer in an event loop."""
_NAME = re.compile(r"[\w.:+/-]{1,100}", re.ASCII)
_SHARED = ("trajectory", "messages", "output", "reward", "rewards", "task", "data", "session", "session_id", "client")
_KNOWN: dict[Per, tuple[str, ...]] = {
    "turn": ("turn", "reply", "tool_calls", "next_messages", "interaction_id", "index", *_SHARED),
    "trajectory": ("turns", "interaction_ids", *_SHARED),
}


@dataclass(frozen=True)
class Scorer:
    """A function that scores turns or trajectories.

    `function` returns a number, or None for no score; for a trajectory, it may return numbers by interaction id. It is
    a coroutine function, or a plain function that is called in a thread. At most `concurrency` calls run at once in an
    event loop. Each call may take `timeout_s` seconds (None: the limit of the run). Calling a Scorer calls its
    function.
    """

    function: Callable[..., Any]
    name: str
    per: Per
    timeout_s: float | None = None
    concurrency: int = CONCURRENCY
    _room: WeakKeyDictionary[Any, asyncio.Semaphore] = field(
        default_factory=WeakKeyDictionary, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise InvalidRequest(
                f"{self.name!r} is not a valid name of a scorer: 1 to 100 characters of A-Z a-z 0-9 _ . : + / -",
                param="name",
            )
        if self.concurrency < 1:
            raise InvalidRequest(f"scorer {self.name}: 'concurrency' must be at least 1", param="concurrency")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise InvalidRequest(f"scorer {self.name}: 'timeout_s' must be above 0", param="timeout_s")

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.function(*arguments, **named)

    def check(self, task: Mapping[str, Any]) -> None:
        """Raise InvalidRequest if the function has a parameter that neither a trajectory nor this row fills."""
        known = {*_KNOWN[self.per], *map(str, task)}
        if first := self._first():
            known.add(first)
        if missing := unknown(self.function, known):
            raise InvalidRequest(
                f"scorer {self.name} has the parameter {missing[0]!r}, which is none of "
                f"{', '.join(_KNOWN[self.per])}, and not a field of the task: rename it, or give it a default",
                param="scorers",
            )

    @property
    def reads_next(self) -> bool:
        """Whether it scores only turns that were followed: its parameter `next_messages` has no default."""
        return any(each.name == "next_messages" and each.default is each.empty for each in parameters(self.function))

    async def score_turn(
        self, turn: Turn, trajectory: Trajectory, timeout_s: float | None, client: AsyncClient | None = None
    ) -> float | None:
        """The score of one turn.

        Raises the function's exception, TimeoutError, and TypeError or ValueError for a result that is not a finite
        number.
        """
        given = {
            **{"turn": turn, "messages": turn.messages, "reply": turn.reply, "output": turn.text},
            **{"tool_calls": turn.tool_calls, "interaction_id": turn.interaction_id, "index": turn.index},
            **{"next_messages": turn.next_messages},
            **{"reward": turn.reward, "rewards": turn.rewards},
        }
        result = await self._called(turn, {**given, "client": client}, trajectory, timeout_s)
        return None if result is None else self._number(result)

    async def score_trajectory(
        self, trajectory: Trajectory, timeout_s: float | None, client: AsyncClient | None = None
    ) -> float | dict[str, float] | None:
        """The score of a trajectory, or scores by interaction id. Raises as `score_turn`."""
        given = {
            **{"messages": trajectory.messages, "output": trajectory.output, "turns": trajectory.turns},
            "interaction_ids": [turn.interaction_id for turn in trajectory.turns],
            **{"reward": trajectory.reward, "rewards": trajectory.rewards},
        }
        result = await self._called(trajectory, {**given, "client": client}, trajectory, timeout_s)
        if isinstance(result, Mapping):
            return {str(key): self._number(value) for key, value in result.items()}
        return None if result is None else self._number(result)

    async def _called(
        self, what: Turn | Trajectory, given: Mapping[str, Any], trajectory: Trajectory, timeout_s: float | None
    ) -> Any:
        known = {
            **trajectory.task,
            **{"trajectory": trajectory, "task": trajectory.task, "data": trajectory.task},
            **{"session": trajectory.session, "session_id": trajectory.session_id},
            **given,
        }
        self.check(trajectory.task)
        first = self._first()
        names = [name for name in wanted(self.function, list(known)) if name != first]
        limit_s = timeout_s if self.timeout_s is None else self.timeout_s
        async with self._places():
            place = [what] if first else []
            return await call_within(limit_s, self.name, self.function, *place, **{each: known[each] for each in names})

    def _first(self) -> str | None:
        """The first parameter if it gets the turn or the trajectory by position: without a default or a known name."""
        for each in parameters(self.function)[:1]:
            if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) and each.default is each.empty:
                return None if each.name in _KNOWN[self.per] else each.name
        return None

    def _places(self) -> asyncio.Semaphore:
        """The semaphore of the running event loop."""
        return self._room.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.concurrency))

    def _number(self, value: Any) -> float:
        return number(value, f"scorer {self.name} returned", "return a number, or None for no score")


@overload
def turn_scorer(function: F) -> Scorer: ...
@overload
def turn_scorer(
    *, name: str | None = None, timeout_s: float | None = None, concurrency: int = CONCURRENCY
) -> Callable[[F], Scorer]: ...
def turn_scorer(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    concurrency: int = CONCURRENCY,
) -> Any:
    """Make a scorer of turns from the decorated function. `name`: by default the name of the function."""
    return _decorator("turn", function, name, timeout_s, concurrency)


@overload
def trajectory_scorer(function: F) -> Scorer: ...
@overload
def trajectory_scorer(
    *, name: str | None = None, timeout_s: float | None = None, concurrency: int = CONCURRENCY
) -> Callable[[F], Scorer]: ...
def trajectory_scorer(
    function: Callable[..., Any] | None = None,
    *,
    name: str | None = None,
    timeout_s: float | None = None,
    concurrency: int = CONCURRENCY,
) -> Any:
    """Make a scorer of trajectories from the decorated function. `name`: by default the name of the function."""
    return _decorator("trajectory", function, name, timeout_s, concurrency)


def _decorator(
    per: Per, function: Callable[..., Any] | None, name: str | None, timeout_s: float | None, concurrency: int
) -> Any:
    def made(function: Callable[..., Any]) -> Scorer:
        return Scorer(function, name or _name_of(function), per, timeout_s, concurrency)

    return made if function is None else made(function)


def load_scorer(path: str) -> Scorer:
    """The scorer at a path: a Scorer, or a function that declares whether it scores turns or trajectories.

    A function declares it by its attribute `per` ("turn" or "trajectory"), or by the name of its first parameter.
    Raises InvalidRequest for other objects.
    """
    return as_scorer(load(path), path)


def as_scorer(found: Any, name: str) -> Scorer:
    """A Scorer unchanged, or the scorer of a function. `name`: its name in errors. Raises InvalidRequest otherwise."""
    if isinstance(found, Scorer):
        return found
    if isinstance(found, type) or not callable(found):
        raise InvalidRequest(f"{name!r} is not a scorer but {type(found).__name__!r}", param="scorers")
    first = next((each.name for each in parameters(found)), None)
    per = getattr(found, "per", first)
    if per not in _KNOWN:
        raise InvalidRequest(
            f"{name!r} does not say what it scores: decorate it with turn_scorer or trajectory_scorer, or name its "
            "first parameter 'turn' or 'trajectory'",
            param="scorers",
        )
    return _of_function(found, cast(Per, per))


@cache
def _of_function(function: Callable[..., Any], per: Per) -> Scorer:
    """One scorer for each function, so that all episodes of a process share its semaphore."""
    return Scorer(function, _name_of(function), per)


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", None) or type(function).__name__
