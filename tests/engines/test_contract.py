"""The contract on engines that need no model: scripted, mailbox, and simulated SGLang and vLLM servers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proxy.engine.contract import (
    CHECKS,
    ContractCheck,
    check_given_tokens_are_scored_as_when_they_were_sampled,
    complete,
)
from proxy.engine.interface import Capability, Engine
from proxy.engine.mailbox import Delivery, Mailbox
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.pool import Pool
from proxy.types import Logprobs, ids_of
from tests.engines.scripts import VOCABULARY, model_like
from tests.engines.wire import serving_wire

PROMPT = ids_of(range(40, 60))


def scripted(chunk: int = 1) -> ScriptedEngine:
    return ScriptedEngine(model_like(chunk=chunk), vocab_size=VOCABULARY, context_length=8192)


async def answer(mailbox: Mailbox, player: ScriptedEngine) -> None:
    """Act as the mailbox's worker, until cancelled."""
    answering = set()
    while True:
        letter = await mailbox.fetch(None, 60.0)
        if letter is None or letter.request.request_id in answering:
            await asyncio.sleep(0.005)  # all waiting requests are being answered
            continue
        answering.add(letter.request.request_id)
        asyncio.create_task(deliver(mailbox, player, letter.request)).add_done_callback(lambda _: None)


async def deliver(mailbox: Mailbox, player: ScriptedEngine, request) -> None:
    reply = await complete(player, replace(request, top_logprobs=0))
    with contextlib.suppress(Exception):  # it was aborted meanwhile
        mailbox.deliver(request.request_id, Delivery(None, ids_of(reply.ids), Logprobs("f", reply.logprobs)))


@contextlib.asynccontextmanager
async def engine_of(kind: str) -> AsyncIterator[Engine]:
    async with contextlib.AsyncExitStack() as stack:
        engine: Engine
        if kind == "scripted":
            engine = scripted()
        elif kind == "mailbox":
            engine = Mailbox(VOCABULARY, 8192)
            worker = asyncio.create_task(
                answer(engine, ScriptedEngine(model_like(chunk=32), vocab_size=VOCABULARY, context_length=8192))
            )
            stack.callback(worker.cancel)
        else:
            url, _ = await stack.enter_async_context(serving_wire(kind))
            engine = Pool([url], connect(VOCABULARY, None), start_timeout_s=30.0)
        await engine.start()
        stack.push_async_callback(engine.close)
        yield engine


SIMULATED = ("sglang", "sglang-incremental", "vllm")


@pytest.mark.parametrize("kind", ["scripted", "mailbox", *SIMULATED])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(kind: str, check: ContractCheck) -> None:
    if kind in SIMULATED and check is check_given_tokens_are_scored_as_when_they_were_sampled:
        pytest.skip("simulated servers have no model: a prompt's logprobs tell its positions")
    async with engine_of(kind) as engine:
        await check(engine, PROMPT)


async def test_all_of_them_implement_engine() -> None:
    for kind in ("scripted", "mailbox", "sglang", "vllm"):
        async with engine_of(kind) as engine:
            assert isinstance(engine, Engine) and Capability.UPDATE_WEIGHTS
