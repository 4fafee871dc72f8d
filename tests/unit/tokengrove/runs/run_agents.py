"""Agents, tasks and functions that the tests of runs name by path."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import httpx

TASKS = [{"question": "one"}, {"question": "two"}]
OTHER_TASKS = [{"question": "one"}, {"question": "three"}]


async def asks(task: Mapping[str, Any], base_url: str) -> float:
    """One turn; the reward is that of the row, else 1."""
    async with httpx.AsyncClient() as http:
        body = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": str(task["question"])}]}
        (await http.post(f"{base_url}/chat/completions", json=body, timeout=60)).raise_for_status()
    return float(task.get("reward", 1.0))


async def fails_on_two(task: Mapping[str, Any], base_url: str) -> float:
    reward = await asks(task, base_url)
    if task["question"] == "two":
        raise RuntimeError("two is too much")
    return reward


async def fails_without_file(task: Mapping[str, Any], base_url: str) -> float:
    """Fails until there is the file that the row names."""
    reward = await asks(task, base_url)
    if not os.access(task["file"], os.R_OK):
        raise RuntimeError("the file is missing")
    return reward


def half(task: Mapping[str, Any]) -> float:
    """A reward function."""
    return 0.5


def tasks() -> list[dict[str, Any]]:
    return TASKS
