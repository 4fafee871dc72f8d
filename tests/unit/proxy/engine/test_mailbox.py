"""The mailbox as an engine: the chunk that a delivery becomes."""

from __future__ import annotations

import asyncio

import pytest

from proxy.engine.mailbox import Delivery, Mailbox
from proxy.engine.requests import GenerateRequest
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tokengrove.reasons import FinishReason


@pytest.mark.parametrize(
    ("ids", "finish"),
    [([5, 6], FinishReason.STOP), ([5, 6, 7], FinishReason.LENGTH), ([5, 6, 2], FinishReason.STOP)],
)
async def test_the_ids_give_the_finish_reason_and_an_end_token_wins_over_the_budget(
    ids: list[int], finish: FinishReason
) -> None:
    mailbox = Mailbox(vocab_size=8, context_length=8)
    request = GenerateRequest("a", PromptIds(ids_of([1])), SamplingParams(max_tokens=3), stop_token_ids=(2,))
    chunks = mailbox.generate(request)
    reading = asyncio.ensure_future(anext(chunks))
    assert await mailbox.fetch(None, 30.0) is not None
    mailbox.deliver("a", Delivery(output_ids=ids_of(ids)))
    assert (await reading).finish is finish
