"""Weight updates while requests run, and while sampled tokens are delayed inside SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from proxy.engine.contract import CollectedReply, request_for
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.types import Ids, ids_of
from tests.engines.gates import AdminGate
from tests.support import until

_HELD_UP_S = 1.0  # seconds, many times the time that loading the tiny weights takes

Read = Callable[[AdminGate, GenerateRequest], Awaitable[CollectedReply]]


async def under_way(
    gate: AdminGate, read: Read, weights: Path, count: int, tokens: int, sampled: int = 20
) -> list[tuple[Ids, asyncio.Future[CollectedReply]]]:
    """Start `count` requests of `tokens` tokens with `weights` as version 0; return after `sampled` tokens of each."""
    await gate.admin.update_weights(str(weights), 0, PauseMode.DRAIN)
    prompts = [ids_of(range(n, n + 30)) for n in range(count)]
    running = [asyncio.ensure_future(read(gate, request_for(prompt, tokens))) for prompt in prompts]
    await until(lambda: len(gate._flights) == count and all(len(flight.output) >= sampled for flight in gate._flights))
    return list(zip(prompts, running, strict=True))


async def update_while_tokens_are_held_up(gate: AdminGate, pid: int, path: Path, version: int, mode: PauseMode) -> None:
    """Update the weights of the SGLang below process `pid` while tokens sampled before do not get through."""
    detokenizer = _detokenizer_below(pid)
    detokenizer.suspend()  # all tokens pass through it
    try:
        updating = asyncio.create_task(gate.admin.update_weights(str(path), version, mode))
        await asyncio.sleep(_HELD_UP_S)
    finally:
        detokenizer.resume()
    await updating


def _detokenizer_below(pid: int) -> Any:
    import psutil

    (process,) = [child for child in psutil.Process(pid).children(recursive=True) if "detokenizer" in child.name()]
    return process
