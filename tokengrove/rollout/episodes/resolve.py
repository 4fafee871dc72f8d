"""Resolves the name of an agent to an `Agent`: the kind of agent, in a fixed order, and its adapter.

A kind is recognised by its methods and the names of its base classes, and its adapter is imported only then. A plain
function needs neither verl, ROLL nor another system.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes.agent import Agent, Reward
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.function_agent import FunctionAgent
from tokengrove.rollout.episodes.plan import AgentSpec
from tokengrove.rollout.function_calls import call
from tokengrove.rollout.imports import load
from tokengrove.rollout.named_arguments import check_construction

_logger = logging.getLogger(__name__)


class Player:
    """Plays with an object that has `play(episode)`, coroutine function or plain function, and optionally `close()`.

    One object plays all episodes, several concurrently. A plain `play` runs in threads.
    """

    def __init__(self, player: Any, name: str) -> None:
        self._player, self.name = player, name

    async def play(self, episode: Episode) -> Reward:
        """Call `play` of the object. Raises its exception."""
        result: Reward = await call(self._player.play, episode)
        return result

    async def close(self) -> None:
        """Call `close` of the object, if it has one. An exception is only logged: the episodes have been played."""
        if not callable(close := getattr(self._player, "close", None)):
            return
        try:
            await call(close)
        except Exception:
            _logger.warning("%s could not be closed", self.name, exc_info=True)


_COMMAND = "tokengrove.rollout.command:CommandAgent"
_SESSIONS = "tokengrove.openenv:is_session_factory", "tokengrove.openenv:SessionFactoryAgent"
_RESOURCES = "tokengrove.openenv:is_resource_factory", "tokengrove.openenv:ResourceFactoryAgent"
_HOW = {_RESOURCES[1]: ("max_turns",)}
"""The arguments of adapters themselves, in addition to the arguments of the class."""
_GEM = "gem:"
_KINDS = (
    "a function agent(task, session) or agent(data, base_url, api_key), async or plain, or a class with __call__; "
    "a class with play(episode); "
    "for AReaL a class with run(data, **extra), or a RolloutWorkflow with arun_episode(engine, data); "
    "for verl a subclass of AgentLoopBase, or the name of a registered loop, such as tool_agent; "
    "for ROLL a subclass of AgentRunner with run_job(seed); "
    "for gem a class of environments with reset and step, or gem:NAME, such as gem:game:GuessTheNumber-v0; "
    "for OpenEnv a class with create(*, task, rollout_id), a ResourceSessionFactory, or openenv.core:MCPToolClient"
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """`is_it`: recognises an object of this kind. `adapter`: called with the object, the arguments and the agent's
    path.
    """

    is_it: Callable[[Any], bool]
    adapter: str


def _has(*methods: str) -> Callable[[Any], bool]:
    return lambda found: all(callable(getattr(found, name, None)) for name in methods)


def _inherits(base: str) -> Callable[[Any], bool]:
    return lambda found: isinstance(found, type) and any(each.__name__ == base for each in found.__mro__)


def _is_openenv(found: Any) -> bool:
    """Whether it is an environment or client of openenv's own classes, whose results differ from gem's."""
    bases = found.__mro__ if isinstance(found, type) else type(found).__mro__
    of_openenv = any(each.__module__.partition(".")[0] == "openenv" for each in bases)
    return of_openenv and _has("reset", "step")(found)


_OF_SYSTEMS = (
    _Kind(_inherits("AgentLoopBase"), "tokengrove.kinds.verl_loop:LoopAgent"),
    _Kind(_has("run_job"), "tokengrove.kinds.roll_runner:RunnerAgent"),
    _Kind(_has("arun_episode"), "tokengrove.kinds.areal_workflow:workflow_agent"),
    _Kind(_has("reset", "step"), "tokengrove.kinds.gem_environment:environment_agent"),
)


def resolve_agent(spec: AgentSpec) -> Agent:
    """Make the agent that `spec` describes. It plays several episodes concurrently.

    Raises InvalidRequest for a path that does not exist, an object that is not an agent, and arguments that do not fit.
    An import or a constructor may raise any exception.
    """
    target, arguments = spec.target, dict(spec.arguments)
    if spec.kind == "command":
        return cast(Agent, load(_COMMAND)(spec))
    if not is_path(target):
        return _of_name(target, arguments)
    found = load(target)
    if _has("run_rollout_loop")(found):
        raise InvalidRequest(f"{target!r} is an environment manager of ROLL: give its YAML (--config)", param="agent")
    if _has("play")(found):
        return Player(_made(found, arguments, target), target)
    if _is_openenv(found):
        return _adapted("tokengrove.kinds.openenv_environment:client_agent", found, arguments, target)
    for kind in _OF_SYSTEMS:
        if kind.is_it(found):
            return _adapted(kind.adapter, found, arguments, target)
    return _of_instance(found, arguments, target)


def is_path(target: str) -> bool:
    """Whether a target is a Python path, not a name of gem or verl."""
    return not target.startswith(_GEM) and not target.isidentifier()


def _of_name(target: str, arguments: Mapping[str, Any]) -> Agent:
    if target.startswith(_GEM):
        return _adapted("tokengrove.kinds.gem_environment:environment_agent", target[len(_GEM) :], arguments, target)
    return _adapted("tokengrove.kinds.verl_loop:LoopAgent", target, arguments, target)


def _of_instance(found: Any, arguments: dict[str, Any], target: str) -> Agent:
    """The kinds whose classes are instantiated here: AReaL's agents, factories of sessions, and callables."""
    if _has("run")(found):
        return _adapted("tokengrove.kinds.areal_agent:ArealAgent", _made(found, arguments, target), {}, target)
    if _has("create")(found):
        for is_it, adapter in (_SESSIONS, _RESOURCES):
            if load(is_it)(found):
                how = {name: arguments.pop(name) for name in _HOW.get(adapter, ()) if name in arguments}
                return cast(Agent, load(adapter)(_made(found, arguments, target), **how))
    if isinstance(found, type) and "__call__" in dir(found):
        return FunctionAgent(_made(found, arguments, target), {}, target)
    if callable(found) and not isinstance(found, type):
        return FunctionAgent(found, arguments, target)
    what = f"the class {found.__name__}" if isinstance(found, type) else f"of type {type(found).__name__}"
    raise InvalidRequest(f"{target!r} is not an agent: it is {what}. An agent is {_KINDS}", param="agent")


def _adapted(adapter: str, found: Any, arguments: Mapping[str, Any], target: str) -> Agent:
    return cast(Agent, load(adapter)(found, arguments, target))


def _made(found: Any, arguments: Mapping[str, Any], target: str) -> Any:
    """An instance: of a class with the arguments, or the object itself, which accepts no arguments."""
    if isinstance(found, type):
        check_construction(found, arguments, target)
        return found(**arguments)
    if arguments:
        wrong = min(arguments)
        raise InvalidRequest(f"{target} is already an instance, so it takes no argument {wrong!r}", param=wrong)
    return found
