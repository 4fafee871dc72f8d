"""Weights that change while requests are under way, and while what was sampled is held up on its way out of SGLang."""

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

_HELD_UP_S = 1.0  # many times what loading the tiny weights takes

Read = Callable[[AdminGate, GenerateRequest], Awaitable[CollectedReply]]


async def under_way(
    gate: AdminGate, read: Read, weights: Path, count: int, tokens: int, sampled: int = 20
) -> list[tuple[Ids, asyncio.Future[CollectedReply]]]:
    """`count` requests of so many `tokens`, prompt and reply to come; `weights`, version 0, have `sampled` of each."""
    await gate.admin.update_weights(str(weights), 0, PauseMode.DRAIN)
    prompts = [ids_of(range(n, n + 30)) for n in range(count)]
    running = [asyncio.ensure_future(read(gate, request_for(prompt, tokens))) for prompt in prompts]
    await until(lambda: len(gate._flights) == count and all(len(flight.output) >= sampled for flight in gate._flights))
    return list(zip(prompts, running, strict=True))


async def update_while_tokens_are_held_up(gate: AdminGate, pid: int, path: Path, version: int, mode: PauseMode) -> None:
    """Change the weights of the SGLang below process `pid` while what was sampled before does not get through."""
    detokenizer = _detokenizer_below(pid)
    detokenizer.suspend()  # all tokens pass it
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
