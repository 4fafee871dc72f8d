"""Nim between two models that one address serves. It uses the stock OpenAI SDK alone, and names its players by seat.

The players take one or two stones of a pile in turn; who takes the last stone wins. Whatever a model answers is a move,
so nobody wins by the form of its answers, and a player that always does the same wins at most half of its games
against one that answers by chance. Who looks at the pile wins more: it leaves a multiple of three.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from openai import AsyncOpenAI

SEATS = ("first", "second")
PILES = (3, 4)


class Game(NamedTuple):
    """A finished game: the seat that won, and the tokens that the replies to each seat report, by seat."""

    winner: str
    tokens: dict[str, int]


async def play(pile: int, openai: AsyncOpenAI, base_url: str, api_key: str) -> Game:
    """Play one game. The `model` of a request is the seat of its player. Each player has its own conversation."""
    agent = openai.with_options(base_url=base_url, api_key=api_key)
    talks: dict[str, list[Any]] = {seat: [] for seat in SEATS}
    tokens = dict.fromkeys(SEATS, 0)
    turn = 0
    while True:
        seat = SEATS[turn % 2]
        talks[seat].append({"role": "user", "content": f"{pile} left"})
        reply = await agent.chat.completions.create(model=seat, messages=talks[seat], max_tokens=1)
        said = reply.choices[0].message.content or ""
        talks[seat].append({"role": "assistant", "content": said})
        tokens[seat] += reply.usage.completion_tokens if reply.usage else 0
        pile -= stones(said)
        if pile <= 0:
            return Game(seat, tokens)
        turn += 1


def stones(said: str) -> int:
    """The stones that an answer takes: one if it has an odd number of characters, else two, or the last one."""
    return 1 if len(said) % 2 else 2
