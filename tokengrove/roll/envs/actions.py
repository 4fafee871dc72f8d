"""Parsing of actions in a model's output, by `action_pattern` and `action_lookup`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

METRICS_AGG_MODE = {
    "action_is_effective": "mean",
    "action_is_valid": "mean",
    "success": "last",
    "format_penalty": "mean",
}
"""How the metrics of an episode's steps are aggregated to one number each."""


def text_of(action: Any) -> str:
    """The text of an action: a text, the content of an assistant message, or ""."""
    if isinstance(action, Mapping):
        action = action.get("content")
    return action if isinstance(action, str) else ""


def parse_action(
    text: str, action_pattern: str, action_lookup: Mapping[int, str], special_token_list: Iterable[str] | None = None
) -> dict[str, Any]:
    """Find the action in `text`: `action` (its number, None if there is none), `action_content`, `think_content`.

    The last group of `action_pattern` is the action, and the first of several the thought. Names of actions are
    compared without regard to case. `special_token_list`: texts that are removed before.
    """
    for token in special_token_list or ():
        text = text.replace(token, "")
    found = re.search(action_pattern, text.strip(), re.DOTALL)
    if found is None:
        return {"action": None, "action_content": "", "think_content": ""}
    groups = [group or "" for group in found.groups()] or [found[0]]
    content = groups[-1].strip()
    numbers = {name.lower(): number for number, name in action_lookup.items()}
    return {
        "action": numbers.get(content.lower()),
        "action_content": content,
        "think_content": groups[0].strip() if len(groups) > 1 else "",
    }


def by_number(lookup: Mapping[Any, str]) -> dict[int, str]:
    """A lookup with integer keys, which are texts in JSON and in overrides of a configuration."""
    return {int(number): name for number, name in lookup.items()}


def instructions(rules: str, grid_vocab: Mapping[str, str], action_lookup: Mapping[int, str]) -> str:
    """The rules of a game, the meanings of the signs of its map if it has any, and its actions."""
    signs = ", ".join(f"{sign}: {meaning}" for sign, meaning in grid_vocab.items())
    actions = ", ".join(action_lookup.values())
    told = f"{rules}\nThe signs of the map are:\n{signs}" if signs else rules
    return f"{told}\nYour actions are:\n{actions}"
