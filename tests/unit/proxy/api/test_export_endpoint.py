"""A piece of an export that is being made in a thread when its reader leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from proxy.api.export_endpoint import _next
from proxy.export_formats.image_table import Pieces


async def test_a_piece_is_waited_for_however_often_its_export_is_cancelled() -> None:
    made, allowed = threading.Event(), threading.Event()

    def pieces() -> Pieces:
        made.set()
        allowed.wait()
        yield b"piece"

    export = asyncio.create_task(_next(pieces(), None))
    await asyncio.to_thread(made.wait)
    for _ in range(3):
        export.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    still_waits = not export.done()
    allowed.set()
    with pytest.raises(asyncio.CancelledError):
        await export
    assert still_waits
