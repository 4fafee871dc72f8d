"""Agents and reward functions that tests of episodes name by their paths."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tokengrove.client import AsyncSession

released = threading.Event()
"""What the blocking agent that hangs waits for."""


async def ask(base_url: str, http_client: Any, text: str = "Hello") -> str:
    """One turn by the SDK of OpenAI; return its id."""
    agent = AsyncOpenAI(base_url=base_url, api_key="any", http_client=http_client, max_retries=0)
    reply = await agent.chat.completions.create(model="any", messages=[{"role": "user", "content": text}])
    return reply.id


async def plain(task: Mapping[str, Any], session: AsyncSession, http_client: Any) -> float:
    await ask(session.base_url, http_client, str(task["question"]))
    return 0.5


def blocking(row: Mapping[str, Any], base_url: str, api_key: str, http_client: Any) -> dict[str, float]:
    agent = OpenAI(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)
    reply = agent.chat.completions.create(model="any", messages=[{"role": "user", "content": row["question"]}])
    return {reply.id: 0.25}


async def scaled(data: Mapping[str, Any], base_url: str, http_client: Any, scale: float = 1.0) -> float:
    await ask(base_url, http_client)
    return scale


def by_messages(messages: Sequence[Mapping[str, Any]], task: Mapping[str, Any], interaction_ids: list[str]) -> float:
    assert len(interaction_ids) == 1
    return float(messages[-1]["content"] == task["answer"])


async def by_turn(interaction_ids: list[str], turns: Sequence[Any], agent_reward: float) -> dict[str, float]:
    await asyncio.sleep(0)
    return {turn.interaction_id: agent_reward + turn.index for turn in turns}


def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(data_source == "trees" and solution_str == ground_truth)


def of_verl_with_more(solution_str: str, ground_truth: str) -> dict[str, Any]:
    """As verl's function for DAPO's mathematics returns it."""
    return {"score": 1.0, "acc": solution_str == ground_truth, "pred": solution_str}


def unscored(output: str) -> dict[str, Any]:
    return {"score": "good"}


def endless() -> int:
    return int("9" * 4000)


def of_trl(prompts: list[Any], completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """In TRL's form, for conversations."""
    assert prompts[0][-1]["role"] == "user" and columns["data_source"] == ["trees"]
    return [float(each[-1]["content"] == right) for each, right in zip(completions, answer, strict=True)]


async def of_trl_texts(completions: list[str], answer: list[str]) -> list[float | None]:
    """In TRL's form, for texts."""
    return [1.0 if each == right else None for each, right in zip(completions, answer, strict=True)]


def too_many(completions: list[Any]) -> list[float]:
    return [1.0, 2.0]


def no_list(completions: list[Any]) -> float:
    return 1.0


def nothing(output: str) -> None:
    assert output


def broken(output: str) -> float:
    raise LookupError("no such tree")


def exits(output: str) -> float:
    raise SystemExit(2)


async def asserts(output: str) -> float:
    pytest.fail("the tree is wrong")


def not_a_number() -> float:
    return float("nan")


async def never() -> float:
    await asyncio.Event().wait()
    return 1.0


def wants_more(messages: Any, rubric: str) -> float:
    return 1.0


constant = 3
