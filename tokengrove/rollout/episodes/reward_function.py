"""A reward function: any function, named by its path. It gets the values that its parameters name.

| parameter | value |
|---|---|
| `messages` | the conversation that ends with the last turn of the agent, including its reply, as chat messages |
| `task` or `data` | the row of the data |
| `interaction_ids` | the ids of the complete turns, in order of completion |
| `output`, `solution_str` | the text of the last reply |
| `turns` | all complete turns (`Turn`) |
| `session` | the session with its tree (`SessionTree`) |
| `session_id`, `task_id`, `sample`, `seed` | values of the episode |
| `agent_reward` | the result of the agent: a float, rewards by interaction id, or None |
| `ground_truth` | `ground_truth` of the row, or of its `reward_model`, as in verl's data |
| any other name | the field of the row with this name |

A function with a parameter `completions` is called like TRL's reward functions: see `batched_reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.client import AsyncClient, SessionTree
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.task import Task
from tokengrove.rollout.function_calls import call_within
from tokengrove.rollout.imports import load
from tokengrove.rollout.named_arguments import parameters, unknown, wanted
from tokengrove.rollout.returned_rewards import function_rewards
from tokengrove.rollout.trajectory import complete, last_of, read_trajectory

_OF_MESSAGES = ("messages", "output", "solution_str")
_KNOWN = (
    *(*_OF_MESSAGES, "task", "data", "interaction_ids", "turns", "session"),
    *("session_id", "task_id", "sample", "seed", "agent_reward"),
)

Given = tuple[float | dict[str, float] | None, dict[str, float]]


class RewardFunction:
    """A reward function. `name`: its name in messages."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function, self.name = function, name

    @classmethod
    def load(cls, path: str) -> RewardFunction:
        """Import the function at a path. Raises InvalidRequest if it is not a function."""
        found = load(path)
        if isinstance(found, type) or not callable(found):
            raise InvalidRequest(f"{path!r} is not a function but {type(found).__name__!r}", param="reward")
        return cls(found, path)

    def check(self, task: Task) -> None:
        """Raise InvalidRequest if the function has a parameter that neither an episode nor this task fills."""
        batched = NAMES if is_batched(self._function) else ()
        if missing := unknown(self._function, {*(batched or _KNOWN), *_columns(task)}):
            known = ", ".join(batched or (*_KNOWN, "ground_truth"))
            raise InvalidRequest(
                f"{self.name} has the parameter {missing[0]!r}, which is none of {known}, and not a field of task "
                f"{task.task_id!r}: rename it, or give it a default",
                param="reward",
            )

    async def reward(
        self, client: AsyncClient, plan: EpisodePlan, tree: SessionTree, agent_reward: Any = None
    ) -> Given:
        """Call the function for an episode; return the rewards, and further values by name.

        Raises the function's exception, TimeoutError after `plan.scoring_timeout_s` seconds, and TypeError or
        ValueError for a result that is not a reward.
        """
        self.check(plan.task)
        if is_batched(self._function):
            return await self._batched(client, plan, tree)
        given = await self._arguments(client, plan, tree, agent_reward)
        result = await call_within(plan.scoring_timeout_s, self.name, self._function, **given)
        return function_rewards(result, self.name)

    async def _batched(self, client: AsyncClient, plan: EpisodePlan, tree: SessionTree) -> Given:
        said = await read_trajectory(client, tree, plan.task.data, last_of(complete(tree)))
        given = batch_of_one(self._function, said.messages, _columns(plan.task))
        result = await call_within(plan.scoring_timeout_s, self.name, self._function, **given)
        return function_rewards(reward_of_one(result, self.name), self.name)

    async def _arguments(
        self, client: AsyncClient, plan: EpisodePlan, tree: SessionTree, agent_reward: Any
    ) -> dict[str, Any]:
        columns, nodes = _columns(plan.task), complete(tree)
        names = wanted(self._function, [*_KNOWN, *(name for name in columns if name not in _KNOWN)])
        known: dict[str, Any] = {
            **columns,
            **{"task": plan.task.data, "data": plan.task.data, "interaction_ids": [node.id for node in nodes]},
            **{"session": tree, "session_id": tree.session_id, "task_id": plan.task.task_id},
            **{"sample": plan.sample, "seed": plan.seed, "agent_reward": agent_reward},
        }
        if {"turns", *_OF_MESSAGES} & set(names):
            read = nodes if "turns" in names else last_of(nodes)
            said = await read_trajectory(client, tree, plan.task.data, read)
            known |= {"turns": said.turns, "messages": said.messages, "output": said.output}
            known["solution_str"] = said.output
        return {name: known[name] for name in names}


def _columns(task: Task) -> dict[str, Any]:
    """The fields of the row by name, with `ground_truth` if the row has it."""
    columns = {str(name): value for name, value in task.data.items()}
    model = columns.get("reward_model")
    if "ground_truth" not in columns and isinstance(model, Mapping) and "ground_truth" in model:
        columns["ground_truth"] = model["ground_truth"]
    return columns


NAMES = ("prompts", "completions")


def is_batched(function: Callable[..., Any]) -> bool:
    """Whether a function takes a batch as TRL passes it. A function that also takes `prompt` has another format."""
    names = {each.name for each in parameters(function)}
    return "completions" in names and "prompt" not in names


def batch_of_one(
    function: Callable[..., Any], messages: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of the function: the conversation, split before the first answer, and the row's fields as columns.

    As in TRL, a completion is a string if the row's `prompt` is a string, and otherwise a list of messages.
    """
    first = next((at for at, message in enumerate(messages) if message.get("role") == "assistant"), len(messages))
    prompt: Any = list(messages[:first])
    completion: Any = list(messages[first:])
    if isinstance(columns.get("prompt"), str):
        prompt = columns["prompt"]
        completion = "".join(str(message.get("content") or "") for message in completion if _is_answer(message))
    known = {**columns, "prompts": prompt, "completions": completion}
    return {name: [known[name]] for name in wanted(function, list(known)) if name != "prompt"}


def reward_of_one(result: Any, name: str) -> Any:
    """The reward of a batch of one. Raises ValueError for a list of another length, and TypeError for another type."""
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        raise TypeError(f"{name} returned {type(result).__name__!r}; with a parameter 'completions', return a list")
    if len(result) != 1:
        raise ValueError(f"{name} returned {len(result)} rewards for one completion")
    return result[0]


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"
