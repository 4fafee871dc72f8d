"""Lines reach their reader in order, and a reader that stalls holds up nobody: what it cannot take is counted."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.telemetry import log_writer
from proxy.telemetry.log_lines import JsonLines
from proxy.telemetry.log_writer import LogWriter

LONG = "x" * 250


class Pipe:
    """A writer to a pipe, and its reader."""

    def __init__(self) -> None:
        self.reader, self.descriptor = os.pipe()
        self.writer = LogWriter(self.descriptor, JsonLines())

    def say(self, number: int, event: str = "line") -> None:
        self.writer.handle(logging.LogRecord("proxy", 20, "", 1, event, ({"n": number, "text": LONG},), None))

    def read_until(self, event: str) -> list[dict[str, object]]:
        """All lines up to and including the first of `event`."""
        said = self.read_some()
        while all(line["event"] != event for line in said):
            said += self.read_some()
        return said

    def read_some(self) -> list[dict[str, object]]:
        """The lines that are there, whole; waits for the first."""
        data = os.read(self.reader, 2**16)
        while not data.endswith(b"\n"):
            data += os.read(self.reader, 2**16)
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reader)
    os.close(pipe.descriptor)


def test_lines_come_in_order_and_a_flush_waits_for_them(pipe: Pipe) -> None:
    pipe.writer.start()
    for number in range(100):
        pipe.say(number)
    pipe.writer.flush()
    os.set_blocking(pipe.reader, False)
    assert [json.loads(line)["n"] for line in os.read(pipe.reader, 2**16).splitlines()] == list(range(100))


def test_a_stalled_reader_stalls_nobody_and_is_told_what_it_missed(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "MOST_WAITING", 500)
    monkeypatch.setattr(log_writer, "_FLUSH_S", 0.01)
    pipe.writer.start()
    for number in range(5000):  # 1.7 MB, and the pipe holds 64 KiB
        pipe.say(number)
    pipe.writer.flush()  # gives up
    said = pipe.read_until("log lines dropped")
    while pipe.writer._queue.qsize():
        said += pipe.read_some()
    pipe.say(5000, "last")
    said += pipe.read_until("last")
    numbers = [line["n"] for line in said if line["event"] == "line"]
    missed = [line["lines"] for line in said if line["event"] == "log lines dropped"]
    assert numbers == sorted(set(numbers))  # type: ignore[type-var]
    assert len(numbers) < 5000 and len(numbers) + sum(missed) == 5000  # type: ignore[arg-type]


def test_without_a_thread_a_stalled_reader_costs_a_second_at_most(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_writer, "_DIRECT_S", 0.001)
    for number in range(300):
        pipe.say(number)
    os.read(pipe.reader, 2**16)
    pipe.say(300, "last")
    said = pipe.read_until("log lines dropped")
    dropped = said[-1]["lines"]
    assert isinstance(dropped, int) and 0 < dropped < 300


def test_nobody_reads_any_more(pipe: Pipe) -> None:
    reader, descriptor = os.pipe()
    os.close(reader)
    writer = LogWriter(descriptor, JsonLines())
    record = logging.LogRecord("proxy", 20, "", 1, "line", ({"n": 1},), None)
    writer.handle(record)
    writer.start()
    writer.handle(record)
    writer.flush()
    os.close(descriptor)


def test_a_forked_process_writes_its_own_lines_and_nobody_elses(pipe: Pipe) -> None:
    pipe.writer.start()
    pipe.say(1)
    if (child := os.fork()) == 0:
        pipe.say(2)  # its thread is gone: written at once
        os._exit(0)
    os.waitpid(child, 0)
    pipe.say(3, "last")
    assert sorted(line["n"] for line in pipe.read_until("last")) == [1, 2, 3]  # type: ignore[type-var]


def test_long_lines_of_several_processes_are_not_mixed(tmp_path: Path) -> None:
    reader, descriptor = os.pipe()
    with (tmp_path / "lock").open("w") as lock:
        writer = LogWriter(descriptor, JsonLines(), lock.fileno())
        children = []
        for child in range(3):
            if (pid := os.fork()) == 0:
                writer.start()
                for number in range(20):
                    told = {"child": child, **{f"t{i}": LONG for i in range(40)}}
                    writer.handle(logging.LogRecord("proxy", 20, "", 1, "line", ({**told, "n": number},), None))
                writer.flush()
                os._exit(0)
            children.append(pid)
        os.close(descriptor)
        data = b""
        while part := os.read(reader, 2**16):
            data += part
        for pid in children:
            os.waitpid(pid, 0)
    os.close(reader)
    said = [json.loads(line) for line in data.splitlines()]
    for child in range(3):
        assert [line["n"] for line in said if line["child"] == child] == list(range(20))


class Unwritable(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        raise ValueError

    @property
    def __notes__(self) -> list[str]:
        raise ValueError


def test_a_record_that_cannot_be_written_fails_neither_who_logs_it_nor_the_thread(pipe: Pipe) -> None:
    pipe.writer.start()
    error = Unwritable()
    for message, arguments, told in [
        ("%d turns", ("many",), None),
        ("%d%%", ({},), None),
        ("%s", (error,), None),
        ("failed", (), (Unwritable, error, None)),
        ("%(none)s", ({"n": 1},), None),
        ("huge", ({"n": 10**5000},), None),
    ]:
        pipe.writer.handle(logging.LogRecord("library", 30, "library.py", 1, message, arguments, told))  # type: ignore[arg-type]
    pipe.say(0, "last")
    events = [line["event"] for line in pipe.read_until("last")]
    assert len(events) == 7
    assert sum("a record of library.py could not be written" in str(event) for event in events) >= 5, events
