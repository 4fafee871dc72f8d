"""Unmodified agents that TRL's trainer is fed by, named by their paths or sent to its own worker's process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.rollout.episodes import EpisodeEnded

HOT = 0.3
"""The temperature that the agents ask for themselves."""


async def talk(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Two turns by the SDK of OpenAI; the reward is the share of ASCII letters in the answers."""
    from openai import AsyncOpenAI

    messages: list[Any] = list(data["prompt"])
    said = ""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as openai:
        for question in ("Go on.", ""):
            reply = await openai.chat.completions.create(model="any", messages=messages, max_tokens=4)
            answer = reply.choices[0].message.content or ""
            said += answer
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": question}]
    return sum(letter.isascii() and letter.isalpha() for letter in said) / max(1, len(said))


def ask(data: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """One turn, which asks for a temperature of its own. Its reward is that of `length_of`."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as openai:
        openai.chat.completions.create(model="any", messages=data["prompt"], temperature=HOT, max_tokens=6, top_p=0.5)


def answer_length(messages: list[Mapping[str, Any]]) -> float:
    """A reward function: the number of characters of the last message."""
    return float(len(messages[-1]["content"]))


def matches(output: str, answer: str) -> float:
    """A reward function: whether the last answer is that of the row."""
    return float(output == answer)


def fails(data: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """A turn, and then an error."""
    ask(data, base_url, api_key)
    raise ValueError("the agent has failed")


def late(data: Mapping[str, Any], base_url: str, api_key: str) -> None:
    """A turn, and then the end of its time."""
    ask(data, base_url, api_key)
    raise EpisodeEnded("Timeout", "the agent's time is over")


def forced(data: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Two turns, the first of them under a grammar."""
    from openai import OpenAI

    with OpenAI(base_url=base_url, api_key=api_key) as openai:
        first = openai.chat.completions.create(
            model="any", messages=data["prompt"], max_tokens=8, response_format={"type": "json_object"}
        )
        answer = {"role": "assistant", "content": first.choices[0].message.content or ""}
        messages: list[Any] = [*data["prompt"], answer, {"role": "user", "content": "More"}]
        openai.chat.completions.create(model="any", messages=messages, max_tokens=8)
    return 1.0
