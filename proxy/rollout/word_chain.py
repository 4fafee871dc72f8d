"""A small game whose reward the agent's own code verifies: each word begins with the last letter of the one before.

The agent says a letter; the model answers with a word of one token that begins with it; the agent says the last letter
of that word; the model answers again, not with the same word. A wrong word ends the chain. Each right one gives 0.5,
so a first word is worth more that leads to a letter for which the model has another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from proxy.client import AsyncClient

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

OPENINGS = "aeiost"
"""The letters with which most of the built-in model's words begin: a random word fits one of them every 25th time."""
WORDS = 2
WORD_REWARD = 0.5


@dataclass(frozen=True, slots=True)
class Game:
    """One chain to play: its first letter, and the seed of the first word (the second word's is one more)."""

    opening: str
    seed: int
    task_id: str
    group_id: str
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Chain:
    """What was said, and the reward of each word."""

    opening: str
    words: tuple[str, ...]
    rewards: tuple[float, ...]


async def play(client: AsyncClient, openai: AsyncOpenAI, game: Game) -> Chain:
    """One session: an agent that knows an address and a key plays, its rewards are set, the session ends."""
    async with client.session(game.task_id, group_id=game.group_id) as session:
        agent = openai.with_options(base_url=session.base_url, api_key=session.api_key)
        words = await _chain(agent, game)
        rewards = verify(game.opening, words)
        await session.set_reward(step_scores=rewards)
        await session.end(outcome="Finished")
    return Chain(game.opening, tuple(words), tuple(rewards))


async def _chain(agent: AsyncOpenAI, game: Game) -> list[str]:
    """The model's words, up to the first wrong one."""
    messages: list[ChatCompletionMessageParam] = []
    words: list[str] = []
    while len(words) < WORDS and all(verify(game.opening, words)):
        messages.append({"role": "user", "content": words[-1][-1] if words else game.opening})
        reply = await agent.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=1,
            temperature=game.temperature,
            seed=game.seed + len(words),
        )
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        words.append(text.strip().lower())
    return words


def verify(opening: str, words: Sequence[str]) -> list[float]:
    """The reward of each word: whether it is new and begins with the letter that was asked for."""
    rewards, letter = [], opening
    for place, word in enumerate(words):
        right = word.startswith(letter) and word not in words[:place]
        rewards.append(WORD_REWARD if right else 0.0)
        letter = word[-1:]
    return rewards
