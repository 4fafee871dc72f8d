"""A chunk that cannot be the engine's own samples fails; nothing of it is taken."""

from __future__ import annotations

import math
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from proxy.engine.chunks import TokenChunk, check_chunk
from proxy.engine.contract import CollectedReply
from proxy.engine.versions import LARGEST_VERSION
from proxy.types import Logprobs, ids_of
from tests.unit.proxy.engine.gated import WatchfulEngine, asking, gate_of, uninterrupted
from tokengrove.errors import EngineFailed

GOOD = TokenChunk(ids_of([0, 5, 9]), Logprobs("f", [-1.0, 0.0, -200.0]))


def logprobs(*values: float) -> dict[str, Any]:
    return {"ids": ids_of(range(len(values))), "logprobs": Logprobs("f", values)}


def top(token: Any, logprob: Any) -> dict[str, Any]:
    return {"top_logprobs": (((token, logprob),), (), ())}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": ids_of([0, 5, 10])}, "token 10, .* 0 to 9"),
        ({"ids": ids_of([0, -1, 9])}, "token -1"),
        ({"ids": ids_of([0, 1, 1_000_000])}, "token 1000000"),
        ({"ids": ids_of([0, 5])}, "3 logprobs for 2 tokens"),
        ({"ids": ids_of([0, 5, 9, 1])}, "3 logprobs for 4 tokens"),
        (logprobs(-1.0, -1.0, -1.0, -1.0, -1.0), "2 tokens more"),
        (logprobs(-1.0, math.nan), "a logprob is (NaN|infinite)"),
        (logprobs(math.inf, -1.0), "a logprob is (NaN|infinite)"),
        (logprobs(-1.0, -math.inf), "a logprob is (NaN|infinite)"),
        (logprobs(-math.inf, math.inf), "a logprob is (NaN|infinite)"),
        (logprobs(-1.0, 0.5), "logprob 0.5"),
        (logprobs(1e30), "at most 0"),
        ({"top_logprobs": (((1, -1.0),),)}, "1 lists of top logprobs for 3 tokens"),
        (top(10, -1.0), "a top logprob of token 10"),
        (top(-1, -1.0), "a top logprob of token -1"),
        (top(True, -1.0), "no token id with a number"),
        (top(1, True), "no token id with a number"),
        (top(1, math.nan), "a top logprob is NaN"),
        (top(1, math.inf), "a top logprob is above 0"),
        (top(1, 0.5), "a top logprob is above 0"),
        ({"unmasked": Logprobs("f", [-1.0])}, "1 unmasked logprobs for 3 tokens"),
        ({"unmasked": Logprobs("f", [-1.0, math.nan, -1.0])}, "a logprob is (NaN|infinite)"),
        ({"version": -1}, "weight version -1"),
        ({"version": LARGEST_VERSION + 1}, "weight version"),
        ({"corrected": ((1, -1),)}, "weight version -1"),
        ({"corrected": ((0, 1),)}, "fewer than one"),
    ],
)
def test_a_chunk_that_cannot_be_right_fails_by_name(change: dict[str, Any], named: str) -> None:
    check_chunk(GOOD, 10, 3)
    with pytest.raises(EngineFailed, match=named):
        check_chunk(replace(GOOD, **change), 10, 3)


@pytest.mark.parametrize(
    "change",
    [
        logprobs(1e-5, -1.0),
        logprobs(-1e30),
        {"ids": ids_of(), "logprobs": Logprobs("f")},
        {"unmasked": Logprobs("f", [-1.0, -2.0, -3.0])},
        {"corrected": ((2, 0), (1, LARGEST_VERSION)), "version": LARGEST_VERSION},
    ],
)
def test_what_an_engine_may_give_passes(change: dict[str, Any]) -> None:
    check_chunk(replace(GOOD, **change), 10, 3)


async def test_the_gate_takes_nothing_of_a_wrong_chunk_and_counts_the_budget_over_lost_servers() -> None:
    class GenerousEngine(WatchfulEngine):
        """Samples one token more than it is asked for, once its server has died."""

        async def generate(self, request: Any) -> Any:
            more = 0 if self.deaths else 1
            most = request.sampling._replace(max_tokens=request.sampling.max_tokens + more)
            async with aclosing(super().generate(replace(request, sampling=most))) as chunks:
                async for chunk in chunks:
                    yield replace(chunk, finish=None) if more else chunk

    engine, request, reply = GenerousEngine(deaths=[4]), asking("a", 9), CollectedReply()
    gate = gate_of(engine)
    with pytest.raises(EngineFailed, match="1 tokens more than it was asked for"):
        await gate.sample(request, reply.add)
    assert reply.ids == uninterrupted(request) and engine.running == [] and gate.running == 0
