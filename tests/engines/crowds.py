"""Concurrent sessions on one engine, each prompt extending the last answer; also one session alone, to compare."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import cast

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply, complete, request_for
from proxy.engine.interface import Engine
from proxy.types import Ids, ids_of

VOCABULARY = 600  # below the markers of the built-in tokenizer


@dataclass(frozen=True, slots=True)
class Growing:
    """A session that is determined by its number: the tokens added in each turn, and the lengths of its answers."""

    number: int
    turns: int = 3

    def added(self) -> list[Ids]:
        """The new tokens of each turn, 1 to 90 of them."""
        rng = random.Random(self.number)
        return [ids_of(rng.choices(range(VOCABULARY), k=rng.randint(1, 90))) for _ in range(self.turns)]

    def most(self, turn: int) -> int:
        """The length of the answer of a turn, in tokens."""
        return 8 + (self.number * 7 + turn * 5) % 25


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn: the prompt of the engine and its reply."""

    prompt: Ids
    reply: CollectedReply


async def converse(engine: Engine, session: Growing, temperature: float = 0.0) -> list[Answered]:
    """Run all turns of a session in order."""
    prompt, answered = ids_of(), []
    for turn, added in enumerate(session.added()):
        prompt = prompt + added
        reply = await complete(engine, request_for(prompt, session.most(turn), temperature))
        answered.append(Answered(prompt, reply))
        prompt = prompt + ids_of(reply.ids)
    return answered


async def converse_all(engine: Engine, count: int, temperature: float = 0.0) -> list[list[Answered]]:
    """Run `count` sessions concurrently."""
    sessions = [Growing(number) for number in range(count)]
    return await asyncio.gather(*(converse(engine, session, temperature) for session in sessions))


async def leave_after(engine: Engine, prompt: Ids, tokens: int, most: int) -> None:
    """Read `tokens` tokens of a longer answer, then close the iterator, as when a client disconnects."""
    chunks = cast("AsyncGenerator[TokenChunk, None]", engine.generate(request_for(prompt, most)))
    async with aclosing(chunks):
        async for chunk in chunks:
            tokens -= len(chunk.ids)
            if tokens <= 0:
                return


async def abort_after(engine: Engine, prompt: Ids, tokens: int, most: int) -> CollectedReply:
    """Abort a request by its id after `tokens` tokens; return all that it sampled."""
    request, reply = request_for(prompt, most), CollectedReply()
    async for chunk in engine.generate(request):
        reply.add(chunk)
        if len(reply.ids) >= tokens and reply.finish is None:
            await engine.abort(request.request_id)
    return reply
