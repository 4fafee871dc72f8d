"""What a dump unpacks to is bounded by the size that a record may have, however small the file is."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import zstandard

from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.dump import Totals, entries
from proxy.store.record_limits import check_packed
from tests.databases import execute
from tests.support import says, serving, user
from tokengrove.errors import ConfigurationError

MIB = 2**20
BOMBS = {
    "spaces": b" " * 64 * MIB,
    "one text": b'{"tokengrove":"' + b"a" * 64 * MIB,
}


# Imports two dumps, and prints by how much the second one raised the peak of the process's memory.
PEAK = """
import re, sys
from pathlib import Path
from proxy.store.backup import Conflict, import_all

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

url, small, large = sys.argv[1:]
import_all(url, Path(small), Conflict.REFUSE, lambda _: None)
before = peak()
import_all(url, Path(large), Conflict.REFUSE, lambda _: None)
print(peak() - before)
"""


class Counting(io.RawIOBase):
    """A stream that counts the bytes that were read from it."""

    def __init__(self, data: io.RawIOBase) -> None:
        self._data, self.read_bytes = data, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        found = self._data.readinto(buffer) or 0
        self.read_bytes += found
        return found


def quiet(_: Totals) -> None:
    pass


def lines(*parts: bytes) -> bytes:
    """A dump with these lines between its header and its trailer."""
    totals = Totals()
    found = [b'{"tokengrove":"dump","format":2,"revision":"0001"}\n', *parts]
    for line in found:
        totals.add(line, orjson.loads(line))
    return b"".join([*found, orjson.dumps({"end": totals.to_json()}) + b"\n"])


def traced(parts: Iterator[object]) -> int:
    """The most memory that is held at once while all parts are read, in bytes."""
    tracemalloc.start()
    try:
        for part in parts:
            del part
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("what", BOMBS)
def test_of_a_bomb_no_more_is_unpacked_than_a_record_may_have(what: str) -> None:
    packed = zstandard.ZstdCompressor().compress(BOMBS[what])
    assert len(packed) < MIB / 50
    plain = Counting(zstandard.ZstdDecompressor().stream_reader(packed))  # type: ignore[arg-type]
    refusal = rf"line 1 of a\.zst has more than {MIB} bytes, .*\(--max-record-bytes\)"

    def read() -> Iterator[object]:
        with pytest.raises(ConfigurationError, match=refusal):
            yield from entries(io.BufferedReader(plain), "a.zst", MIB)

    assert traced(read()) < 4 * MIB
    assert MIB < plain.read_bytes < 2 * MIB


async def test_an_import_of_a_bomb_names_the_line_the_limit_and_the_option(tmp_path: Path) -> None:
    path = tmp_path / "bomb.jsonl.zst"
    path.write_bytes(zstandard.ZstdCompressor().compress(lines(b'{"x":"' + b"a" * 2 * MIB + b'"}\n')))
    url = f"sqlite:///{tmp_path / 'into.db'}"
    refusal = rf"line 2 of {path} has more than {MIB} bytes, .*\(--max-record-bytes\)"
    with pytest.raises(ConfigurationError, match=refusal):
        import_all(url, path, Conflict.REFUSE, quiet, MIB)
    assert execute(url, "SELECT count(*) FROM sessions") == [(0,)]


def test_a_record_may_have_exactly_as_much_as_its_limit() -> None:
    line = b'{"x":"' + b"a" * 1000 + b'"}\n'
    assert len(list(entries(io.BytesIO(lines(line)), "a", len(line)))) == 2
    with pytest.raises(ConfigurationError, match=f"line 2 of a has more than {len(line) - 1} bytes"):
        list(entries(io.BytesIO(lines(line)), "a", len(line) - 1))


@pytest.mark.parametrize("line", [b"[" + b"[]," * 300_000 + b"[]]\n", b'["\\ud83d\\ude00' + b"a" * 900_000 + b'"]\n'])
def test_a_record_whose_values_take_far_more_memory_than_its_text_is_not_parsed(line: bytes) -> None:
    assert len(line) < MIB
    with pytest.raises(ConfigurationError, match=rf"line 1 of a takes more than {4 * MIB} .*--max-record-bytes {MIB}"):
        next(entries(io.BytesIO(line), "a", MIB))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the peak of a process's memory")
@pytest.mark.wide
async def test_an_import_takes_at_most_four_times_a_record_of_long_values(tmp_path: Path) -> None:
    url, into = (f"sqlite:///{tmp_path / name}" for name in ("from.db", "into.db"))
    async with serving(tmp_path, says("one"), database_url=url) as server:
        await server.chat([user("a")], session="s")
    small, large = tmp_path / "small.jsonl", tmp_path / "large.jsonl.zst"
    export_all(url, str(small), quiet)
    execute(url, "UPDATE sessions SET session_id = 'large'")
    execute(url, f"UPDATE interactions SET id = 'i', session_id = 'large', logprobs = randomblob({24 * MIB})")
    execute(url, "UPDATE returns SET interaction_id = 'i'")
    export_all(url, str(large), quiet)
    asked = [sys.executable, "-c", PEAK, into, str(small), str(large)]
    printed = await asyncio.to_thread(subprocess.check_output, asked)
    assert int(printed) < 4 * 32 * MIB


@pytest.mark.parametrize("text", [b" " * 4 * MIB, b"[" + b"[]," * 200_000 + b"[]]"])
def test_stored_json_that_unpacks_to_too_much_is_refused_by_its_column(text: bytes) -> None:
    packed = b"z" + zlib.compress(text)
    check_packed({"tools": packed}, "session 's'", 16 * MIB)
    with pytest.raises(ConfigurationError, match=rf"tools of session 's' unpacks to more than {MIB} .*--max-record"):
        check_packed({"tools": packed}, "session 's'", MIB)


def test_of_stored_json_no_more_is_unpacked_than_a_record_may_have() -> None:
    packed = b"z" + zlib.compress(b" " * 256 * MIB)

    def check() -> Iterator[object]:
        with pytest.raises(ConfigurationError):
            check_packed({"tools": packed}, "session 's'", MIB)
        yield None

    assert traced(check()) < 4 * MIB


def test_what_cannot_be_unpacked_is_left_to_the_check() -> None:
    whole = zlib.compress(b"[1]" * 99)
    for broken in (b"z", b"z123", b"Z" + whole[:-5], b"j[", b"", None):
        check_packed({"tools": broken}, "session 's'", MIB)


async def test_an_import_refuses_a_session_whose_stored_json_is_a_bomb(tmp_path: Path) -> None:
    url, into = (f"sqlite:///{tmp_path / name}" for name in ("from.db", "into.db"))
    async with serving(tmp_path, says("one"), database_url=url) as server:
        await server.chat([user("a")], session="s")
    bomb = (b"z" + zlib.compress(b" " * 2 * MIB)).hex()
    execute(url, f"UPDATE interactions SET tools = X'{bomb}'")
    path = tmp_path / "dump.jsonl"
    export_all(url, str(path), quiet)
    with pytest.raises(ConfigurationError, match=rf"tools of session 's' of {path} unpacks to more than {MIB} bytes"):
        import_all(into, path, Conflict.REFUSE, quiet, MIB)
    assert execute(into, "SELECT count(*) FROM sessions") == [(0,)]
    done, _ = import_all(into, path, Conflict.REFUSE, quiet)
    assert done.sessions == 1
