"""The same rollouts without a proxy: token ids go straight into the engine, on the engine's own event loop.

All work outside the engine is done before the clock starts: texts are tokenized, and the tokens that a template puts
between two turns are known. These figures are an upper bound for any server in front of this engine."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

from proxy.engine.interface import Engine
from proxy.engine.requests import GenerateRequest
from proxy.prompt_ids import PromptIds
from proxy.rendering.renderer import Renderer
from proxy.types import Api, Ids, Message, Role, SamplingParams, TurnRequest, ids_of
from tests.bench.rollouts import Arm, Reply, Workload
from tokengrove.reasons import FinishReason

_ANSWER = "Yes."
_serials = itertools.count()


@dataclass(frozen=True, slots=True)
class Session:
    """The tokens of one session that are not sampled: its first prompt, and what follows each answer."""

    number: int
    first: Ids
    after: tuple[Mapping[FinishReason, Ids], ...]


def prepare(renderer: Renderer, workload: Workload, arm: Arm) -> list[Session]:
    """Return all sessions of an arm as tokens."""
    return [_prepared(renderer, number, workload.texts(arm.seed, number)) for number in range(workload.sessions)]


def _prepared(renderer: Renderer, number: int, texts: list[str]) -> Session:
    first = renderer.render((Message(Role.USER, texts[0]),), (), {})
    return Session(number, first, tuple(_followers(renderer, first, text) for text in texts[1:]))


def _followers(renderer: Renderer, prompt: Ids, text: str) -> Mapping[FinishReason, Ids]:
    """Return the tokens after an answer, by its finish reason: they do not depend on the words of the answer."""
    said, answer, new = renderer.encode(_ANSWER), Message(Role.ASSISTANT, _ANSWER), (Message(Role.USER, text),)
    ended = said + ids_of(renderer.stop_token_ids[:1])
    outputs = {FinishReason.LENGTH: said, FinishReason.STOP: ended}
    return {end: renderer.bridge(prompt, output, answer, new, (), {}) or ids_of() for end, output in outputs.items()}


async def run_direct(
    engine: Engine, sessions: list[Session], workload: Workload, arm: Arm, stops: tuple[int, ...]
) -> list[Reply]:
    """Run all sessions at once."""
    turn = TurnRequest(Api.CHAT, "bench", (), stream=arm.stream)  # `stream` decides how many tokens a chunk has
    lists = await asyncio.gather(*(_session(engine, session, workload, turn, stops) for session in sessions))
    return list(itertools.chain.from_iterable(lists))


async def _session(
    engine: Engine, session: Session, workload: Workload, turn: TurnRequest, stops: tuple[int, ...]
) -> list[Reply]:
    sampling = SamplingParams(max_tokens=workload.reply_tokens)
    prompt, replies = session.first, []
    for number in range(workload.turns):
        request = GenerateRequest(
            f"direct-{next(_serials)}",
            PromptIds(prompt),
            sampling,
            stops,
            session_id=f"direct-{session.number}",
            turn=turn,
        )
        reply, output, finish = await _generate(engine, request, session.number, number)
        replies.append(reply)
        if number < len(session.after):
            prompt = prompt + output + session.after[number][finish]
    return replies


async def _generate(
    engine: Engine, request: GenerateRequest, session: int, turn: int
) -> tuple[Reply, Ids, FinishReason]:
    begun_ns, first_ns, cached, output, finish = time.monotonic_ns(), 0, 0, ids_of(), FinishReason.LENGTH
    async with aclosing(cast("Any", engine.generate(request))) as chunks:
        async for chunk in chunks:
            first_ns = first_ns or (time.monotonic_ns() if chunk.ids else 0)
            output += chunk.ids
            cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
            finish = chunk.finish or finish
    times = (begun_ns, first_ns if request.turn is not None and request.turn.stream else 0, time.monotonic_ns())
    return Reply(session, turn, *times, len(request.input_ids), cached, len(output)), output, finish
