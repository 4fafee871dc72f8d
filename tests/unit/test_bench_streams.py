"""What the benches of streams compute from the notes of the simulated engine server and of the clients."""

from __future__ import annotations

import orjson
import pytest

from tests.bench import streams
from tests.bench.streams import Reader, delays_of
from tests.bench.upstream import Stream, Tokens

MS = 1_000_000


def event(text: str) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % text.encode()


async def reader_of(*pieces: tuple[int, bytes]) -> Reader:
    reader = Reader(b"")
    reader.pieces = [(0, b"HTTP/1.1 200 OK\r\n\r\n"), *pieces]
    return reader


async def test_a_token_has_arrived_when_its_event_is_complete() -> None:
    first, second = event("one"), event(" two three")
    reader = await reader_of((1, first + second[:20]), (2, second[20:]), (3, event(" four") + b"0\r\n\r\n"))
    assert reader.arrivals() == [1, 2, 2, 3]


async def test_a_refused_stream_is_an_error() -> None:
    reader = Reader(b"")
    reader.pieces = [(0, b"HTTP/1.1 429 Too Many Requests\r\n\r\n")]
    with pytest.raises(RuntimeError, match="429"):
        reader.arrivals()


def test_the_delay_of_a_token_includes_the_wait_for_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "TOKENS", 3)
    monkeypatch.setattr(streams, "RATE", 100.0)
    stream = {"seed": 7, "begun": 0, "arrivals": [5 * MS, 25 * MS, 25 * MS]}
    found = delays_of([stream], {"7": [(3 * MS, 1), (23 * MS, 3)]})
    assert found.delays == pytest.approx([2, 12, 2])
    assert found.added == pytest.approx([2, 2, 2])
    assert found.firsts == pytest.approx([5]) and found.part_tokens == 1.5


def test_lost_tokens_are_an_error() -> None:
    with pytest.raises(RuntimeError, match="1 tokens"):
        delays_of([{"seed": 1, "begun": 0, "arrivals": [1]}], {"1": [(0, 1)]})


def test_a_stream_sends_one_token_first_and_then_as_many_as_asked() -> None:
    tokens = Tokens([10, 11, 12])
    chunks = list(Stream(lambda start, end, most: tokens.sglang(start, end, most, 5), 6, 4, 0).chunks())
    parts = [orjson.loads(chunk.split(b"data: ")[1].split(b"\n")[0]) for chunk in chunks]
    assert [part["output_ids"] for part in parts] == [[10], [11, 12, 10, 11], [12]]
    assert [part["meta_info"]["completion_tokens"] for part in parts] == [1, 5, 6]
    assert [len(part["meta_info"]["output_token_logprobs"]) for part in parts] == [1, 4, 1]
    assert [part["meta_info"]["finish_reason"] is None for part in parts] == [True, True, False]
    assert b"[DONE]" in chunks[-1]
