"""An agent that plays Harbor tasks as episodes, each in its own environment."""

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
    """Plays the Harbor task that an episode's data names.

    `agent`: the words of a command, or the path of a coroutine function. `options`: the fields of `HarborOptions`, some
    of `CommandOptions`, and for a function its arguments.
    """

    def __init__(self, agent: str | Sequence[str], **options: Any) -> None:
        """Raises ConfigurationError or InvalidRequest for an invalid agent, or an option that does not apply."""
        here, others = split(options)
        self.options = HarborOptions.read(here if isinstance(agent, str) else options)
        self._phase = _phase(agent, self.options, others)
        self._sandboxes = Sandboxes(self.options)

    async def play(self, episode: Episode) -> float:
        """Play the task in the folder that `harbor` in the task's data names; return its reward.

        Further rewards become scores of the episode. Raises the exceptions of `Trial.play`.
        """
        folder = episode.task.data.get(FOLDER)
        if not isinstance(folder, str):
            raise InvalidRequest(
                f"task {episode.task.task_id!r} is not a Harbor task: its data has no folder as {FOLDER!r}",
                param="data",
            )
        task = await in_thread(lambda: self._sandboxes.task(Path(folder)), "tokengrove-harbor-task")
        work = partial(self._phase.play, episode)
        return self._rewarded(
            await Trial(task, episode.plan.session_id, work, self.options, self._sandboxes.make).play(), episode
        )

    async def close(self) -> None:
        """Cancel builds that still run."""
        await self._sandboxes.close()

    def _rewarded(self, found: dict[str, float], episode: Episode) -> float:
        """The main reward: the reward with the name `reward_key`, or the only reward."""
        key = self.options.reward_key
        if key not in found and len(found) != 1:
            raise RewardFailed(
                f"none of the rewards {', '.join(found) or '(none)'} is {key!r}; give one of them as reward_key"
            )
        main = key if key in found else next(iter(found))
        episode.scores.update({name: value for name, value in found.items() if name != main})
        return found[main]


_PATH = "tokengrove.rollout.harbor:HarborAgent"


def agent_spec(spec: AgentSpec) -> AgentSpec:
    """The specification of an agent for Harbor tasks: a `HarborAgent` with the command or path of `spec`."""
    if spec.target == _PATH:
        return spec
    agent: str | list[str] = list(spec.words) if spec.kind == "command" else spec.target
    return AgentSpec("path", _PATH, arguments={"agent": agent, **spec.arguments})


def _phase(agent: str | Sequence[str], options: HarborOptions, arguments: dict[str, Any]) -> AgentPhase:
    if not agent:
        raise ConfigurationError("there is no agent for Harbor tasks: give a command after --, or a path")
    if agent in ("oracle", "nop"):
        raise ConfigurationError(f"{agent} does not call a model: run `tokengrove harbor` instead")
    if not isinstance(agent, str):
        return CommandPhase(agent, options.command)
    return FunctionPhase(agent, arguments)
