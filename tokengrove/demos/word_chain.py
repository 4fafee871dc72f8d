"""The word chain, a small game with a verifiable reward: each word begins with the last letter of the previous word.

The agent sends a letter, and the model answers with a word of at most two tokens that begins with it. The agent sends
the last letter of that word, and the model answers with another word. A wrong word ends the chain. Each right word is
worth 0.5, so the best first word ends in a letter for which the model knows a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokengrove.client import AsyncClient

if TYPE_CHECKING:
    from openai import AsyncOpenAI
    from openai.types.chat import ChatCompletionMessageParam

OPENINGS = "aeiost"
"""First letters of most words of the built-in model; a random word begins with a given one about 1 time in 25."""
WORDS = 2
WORD_TOKENS = 2
WORD_REWARD = 0.5


@dataclass(frozen=True, slots=True)
class Game:
    """One chain to play: its first letter, and the seed of the first word (the second word's is one higher)."""

    opening: str
    seed: int
    task_id: str
    group_id: str
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Chain:
    """A finished game: its session, its words and their rewards, and the number of tokens that the model sampled."""

    session_id: str
    opening: str
    words: tuple[str, ...]
    rewards: tuple[float, ...]
    tokens: int


async def play(client: AsyncClient, openai: AsyncOpenAI, game: Game) -> Chain:
    """Play one game as one session: an agent with only an address and a key plays, then rewards are set."""
    async with client.session(game.task_id, group_id=game.group_id) as session:
        agent = openai.with_options(base_url=session.base_url, api_key=session.api_key)
        words, tokens = await _chain(agent, game)
        rewards = verify(game.opening, words)
        await session.set_reward(step_scores=rewards)
        await session.end(outcome="Finished")
    return Chain(session.session_id, game.opening, tuple(words), tuple(rewards), tokens)


async def _chain(agent: AsyncOpenAI, game: Game) -> tuple[list[str], int]:
    """The model's words, up to the first wrong one, and the number of sampled tokens that the replies report."""
    messages: list[ChatCompletionMessageParam] = []
    words: list[str] = []
    tokens = 0
    while len(words) < WORDS and all(verify(game.opening, words)):
        messages.append({"role": "user", "content": last_letter(words[-1]) if words else game.opening})
        reply = await agent.chat.completions.create(
            model="demo",
            messages=messages,
            max_tokens=WORD_TOKENS,
            temperature=game.temperature,
            seed=game.seed + len(words),
        )
        text = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        words.append(text.strip().lower())
        tokens += reply.usage.completion_tokens if reply.usage else 0
    return words, tokens


def verify(opening: str, words: Sequence[str]) -> list[float]:
    """The reward of each word: WORD_REWARD if it is new and begins with the requested letter, else 0."""
    rewards, letter = [], opening
    for place, word in enumerate(words):
        right = word.startswith(letter) and word not in words[:place]
        rewards.append(WORD_REWARD if right else 0.0)
        letter = last_letter(word)
    return rewards


def last_letter(word: str) -> str:
    """The last letter of a word, which may end in another character. A word without letters is returned unchanged."""
    return next((character for character in reversed(word) if character.isalpha()), word)
