"""Reward functions in TRL's format, which map lists of prompts and completions to rewards, with a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.rollout.named_arguments import parameters, wanted

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
