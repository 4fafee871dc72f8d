"""The program that holds an environment open ends whenever its holder is closed."""

from __future__ import annotations

import asyncio

import pytest

from tokengrove.rollout.harbor import holder
from tokengrove.rollout.harbor.holder import Holder


async def test_one_that_never_is_ready_nor_ends_is_killed_while_somebody_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holder, "_ENDS_S", 0.1)
    reading = asyncio.Event()
    loop, line = asyncio.get_running_loop(), Holder._line

    def told(held: Holder) -> str:
        loop.call_soon_threadsafe(reading.set)
        return line(held)

    monkeypatch.setattr(Holder, "_line", told)
    held = Holder(["sleep", "1000"], {"PATH": "/usr/bin:/bin"})
    waiting = asyncio.ensure_future(held.ready())
    await reading.wait()
    await asyncio.to_thread(held.close)
    with pytest.raises(RuntimeError, match="it ended without output"):
        await waiting
    held.close()
