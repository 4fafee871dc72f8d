"""Harbor tasks as episodes: an agent that plays whatever task the episode names, in an environment of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, Episode, RewardFailed
from tokengrove.rollout.harbor.agent_phase import AgentPhase, CommandPhase, FunctionPhase
from tokengrove.rollout.harbor.data import FOLDER
from tokengrove.rollout.harbor.options import HarborOptions, split
from tokengrove.rollout.harbor.sandboxes import Sandboxes
from tokengrove.rollout.harbor.trial import Trial
from tokengrove.rollout.threads import in_thread


class HarborAgent:
    """`agent`: the words of a command, or the path of a coroutine function. `options` are the fields of
    `HarborOptions`, some of `CommandOptions`, and for a function its arguments.
    """

    def __init__(self, agent: str | Sequence[str], **options: Any) -> None:
        """Raises ConfigurationError or InvalidRequest for an agent that cannot be, or an option that does not apply."""
        here, others = split(options)
        self.options = HarborOptions.read(here if isinstance(agent, str) else options)
        self._phase = _phase(agent, self.options, others)
        self._sandboxes = Sandboxes(self.options)

    async def play(self, episode: Episode) -> float:
        """Play the task's folder, which is `harbor` in the task's data; return its reward.

        Further rewards become scores of the episode. Raises what `Trial.play` does.
        """
        folder = episode.task.data.get(FOLDER)
        if not isinstance(folder, str):
            raise InvalidRequest(
                f"task {episode.task.task_id!r} is none of Harbor: its data has no folder as {FOLDER!r}", param="data"
            )
        task = await in_thread(lambda: self._sandboxes.task(Path(folder)), "tokengrove-harbor-task")
        work = partial(self._phase.play, episode)
        return self._rewarded(
            await Trial(task, episode.plan.session_id, work, self.options, self._sandboxes.make).play(), episode
        )

    async def close(self) -> None:
        """End what is still being built for episodes."""
        await self._sandboxes.close()

    def _rewarded(self, found: dict[str, float], episode: Episode) -> float:
        """The main reward: the one with the name that the options give, or the only one."""
        key = self.options.reward_key
        if key not in found and len(found) != 1:
            raise RewardFailed(f"none of the rewards {', '.join(found) or '(none)'} is {key!r}; name one as reward_key")
        main = key if key in found else next(iter(found))
        episode.scores.update({name: value for name, value in found.items() if name != main})
        return found[main]


_PATH = "tokengrove.rollout.harbor:HarborAgent"


def agent_spec(spec: AgentSpec) -> AgentSpec:
    """How an agent that a user named plays tasks of Harbor: `HarborAgent` with its command or path."""
    if spec.target == _PATH:
        return spec
    agent: str | list[str] = list(spec.words) if spec.kind == "command" else spec.target
    return AgentSpec("path", _PATH, arguments={"agent": agent, **spec.arguments})


def _phase(agent: str | Sequence[str], options: HarborOptions, arguments: dict[str, Any]) -> AgentPhase:
    if not agent:
        raise ConfigurationError("there is no agent for Harbor tasks: give a command after --, or a path")
    if agent in ("oracle", "nop"):
        raise ConfigurationError(f"{agent} calls no model, so there is nothing to roll out: run `tokengrove harbor`")
    if not isinstance(agent, str):
        return CommandPhase(agent, options.command)
    return FunctionPhase(agent, arguments)
