"""Exports leave room for turns: nothing is encoded in the event loop, and while turns run, work is followed by rest."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

import pytest

from proxy.api import pace
from proxy.api.pace import Pace
from proxy.formats.choice import Format, encoder
from proxy.trajectory.options import ExportOptions
from tests.api.test_export import always, chain
from tests.support import serving, user


class Touched(Exception):
    pass


class Rows(Sequence[Any]):
    """Rows that say when an encoder looks at them."""

    def __getitem__(self, index: Any) -> Never:
        raise Touched

    def __len__(self) -> Never:
        raise Touched


@pytest.mark.parametrize("name", list(Format))
def test_a_session_is_encoded_only_where_its_piece_is_asked_for(name: Format) -> None:
    encoding = encoder(name, ExportOptions())
    try:
        pieces = encoding.add("s", Rows(), {})
        with pytest.raises(Touched):
            next(pieces)
    finally:
        encoding.close()


@pytest.mark.parametrize(("turns_run", "rests"), [(True, [2.5]), (False, [])])
async def test_a_slice_of_work_is_followed_by_a_rest_of_its_length_while_turns_run(
    monkeypatch: pytest.MonkeyPatch, turns_run: bool, rests: list[float]
) -> None:
    clock, rested = [10.0], []

    async def slice_() -> str:
        clock[0] += 2.5
        return "done"

    async def sleep(seconds: float) -> None:
        rested.append(seconds)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(pace.asyncio, "sleep", sleep)
    assert await Pace(lambda: turns_run).work(slice_()) == "done"
    assert rested == rests


@pytest.mark.parametrize("name", list(Format))
async def test_an_export_beside_a_turn_that_waits_is_the_same_to_the_byte(tmp_path: Path, name: Format) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        body = {"format": name, "session_ids": ["s"]}
        alone = await server.post("/export_trajectories", body)
        await server.ok("/engine/pause_generation", {})
        turn = asyncio.create_task(server.chat([user("other")], session="other"))
        while not server.app.state.turns.busy:  # noqa: ASYNC110 (a turn that arrives sets no event)
            await asyncio.sleep(0)
        beside = await server.post("/export_trajectories", body)
        await server.ok("/engine/continue_generation", {})
        assert (await turn)["choices"]
        assert (alone.status_code, alone.content) == (beside.status_code, beside.content)
