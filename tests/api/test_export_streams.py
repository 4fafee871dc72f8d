"""Layout individual is laid out and sent turn by turn: its rows together take far more than the session."""

from __future__ import annotations

import asyncio
import json
import weakref
from pathlib import Path
from typing import Any

import pytest

from proxy.export_formats import arrow
from proxy.export_formats.create_encoder import encoder
from proxy.trajectory import sample_maker
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.token_arrays import TokenArrays
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tests.support import Server, assistant, says, serving, user
from tokengrove.options.export import ExportFormat, Layout

TURNS = 40
STREAMED = (ExportFormat.JSON, ExportFormat.JSONL, ExportFormat.AREAL, ExportFormat.ARROW, ExportFormat.PARQUET)
OPTIONS = LayoutOptions(layout=Layout.INDIVIDUAL)


class Watched:
    """Counts the samples whose token arrays were made, and those that are still alive."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[weakref.ref[Any]] = []
        fill = sample_maker.fill

        def watched(*arguments: Any) -> TokenArrays:
            arrays = fill(*arguments)
            self._made.append(weakref.ref(arrays.input_ids))
            return arrays

        monkeypatch.setattr(sample_maker, "fill", watched)

    @property
    def made(self) -> int:
        return len(self._made)

    @property
    def alive(self) -> int:
        return sum(ref() is not None for ref in self._made)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def chain() -> list[Interaction]:
    return [
        interaction(str(at), parent=str(at - 1) if at else None, prefix=10 * at, suffix=[1] * 8, output=[2, 3], seq=at)
        for at in range(TURNS)
    ]


@pytest.mark.parametrize("name", list(ExportFormat))
def test_few_samples_are_alive_at_a_time_in_any_format(
    name: ExportFormat, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrow, "_GROUP_BYTES", 4000)  # a few rows
    laid = lay_out(SessionRecord("s"), chain(), OPTIONS)
    assert watched.made == 0
    encoding = encoder(name, OPTIONS)
    most, first = 0, None
    for piece in encoding.add(laid.rows, {}):
        most = max(most, watched.alive)
        first = watched.made if first is None and piece else first
    assert watched.made == TURNS
    assert most <= 10
    if name in STREAMED:
        assert first is not None and first <= 10
    assert b"".join(encoding.finish({"cursor": None}))
    encoding.close()
    assert watched.alive == 0


def test_rows_can_be_read_again_and_in_part() -> None:
    laid = lay_out(SessionRecord("s"), chain(), OPTIONS)
    assert len(laid.rows) == len(list(laid.rows)) == TURNS
    names = [row.labels()["interaction_id"] for row in laid.rows[-2:]]
    assert names == [str(TURNS - 2), str(TURNS - 1)] == [laid.rows[at].labels()["interaction_id"] for at in (-2, -1)]
    assert laid.rows[3].columns()["weight"].tolist() == [pytest.approx(1 / TURNS)]


async def test_the_first_bytes_are_sent_before_the_last_turn_is_laid_out(tmp_path: Path, watched: Watched) -> None:
    async with serving(tmp_path, says(*"abcdefgh")) as server:
        messages = [user("q")]
        for _ in range(8):
            reply = await server.chat(messages)
            messages += [assistant(reply["choices"][0]["message"]["content"]), user("more")]
        made = await made_at_each_chunk(server, {"session_id": "s", "layout": "individual"}, watched)
    assert made[0] == 1
    assert made[-1] == 8


async def made_at_each_chunk(server: Server, body: dict[str, Any], watched: Watched) -> list[int]:
    """Call the application itself; return how many samples had been made when each chunk was sent."""
    found: list[int] = []
    incoming = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body"):
            found.append(watched.made)

    scope = {"type": "http", "method": "POST", "path": "/export_trajectories", "raw_path": b"/export_trajectories"}
    scope |= {
        "headers": [(b"content-type", b"application/json")],
        "query_string": b"",
        "http_version": "1.1",
        "asgi": {"version": "3.0"},
        "scheme": "http",
    }
    scope |= {"root_path": "", "server": ("t", 80), "client": ("t", 1)}
    await server.app(scope, receive, send)
    return found
