"""Reward functions in TRL's form: lists of prompts and completions in, a list of rewards out; here a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.rollout.named_arguments import parameters, wanted

NAMES = ("prompts", "completions")


def is_batched(function: Callable[..., Any]) -> bool:
    """Whether it takes a batch as TRL gives it. One that takes a `prompt` too is of another system."""
    names = {each.name for each in parameters(function)}
    return "completions" in names and "prompt" not in names


def batch_of_one(
    function: Callable[..., Any], messages: Sequence[Mapping[str, Any]], columns: Mapping[str, Any]
) -> dict[str, Any]:
    """Its arguments: the conversation, divided where the model first answered, and the fields of the row as columns.

    As with TRL, a completion is a text if the row's `prompt` is one, and else a list of messages.
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
    """The reward of a batch of one. Raises ValueError for a list of another length, and TypeError for no list."""
    if isinstance(result, str | Mapping) or not hasattr(result, "__len__"):
        raise TypeError(f"{name} returned {type(result).__name__!r}; with a parameter 'completions', return a list")
    if len(result) != 1:
        raise ValueError(f"{name} returned {len(result)} rewards for one completion")
    return result[0]


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"
