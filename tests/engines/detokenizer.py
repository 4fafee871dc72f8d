"""SGLang's detokenizer process, which all tokens pass on their way out, held up for a while."""

from __future__ import annotations

import asyncio
from typing import Any

from proxy.engine.base import PauseMode
from proxy.engine.gate import Gate

_HELD_UP_S = 1.0  # many times what loading the tiny weights takes


async def update_while_tokens_are_held_up(gate: Gate, pid: int, path: str, version: int, mode: PauseMode) -> None:
    """Change the weights of the SGLang below process `pid` while what was sampled before does not get through."""
    detokenizer = _below(pid)
    detokenizer.suspend()
    try:
        updating = asyncio.create_task(gate.update_weights(path, version, mode))
        await asyncio.sleep(_HELD_UP_S)
    finally:
        detokenizer.resume()
    await updating


def _below(pid: int) -> Any:
    import psutil

    (process,) = [child for child in psutil.Process(pid).children(recursive=True) if "detokenizer" in child.name()]
    return process
