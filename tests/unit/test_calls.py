"""The counting of function entries, which `.ci/run` holds to limits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import IO

import orjson

from tests.bench.calls import SINGLE, UNARY, excesses, median

PROGRAM = """
import sys, threading

def work():
    pass

def count_to(end):
    for number in range(end):
        yield number

def in_thread():
    for _ in range(7):
        work()

def idle():
    sys.stdin.read()

work()
print("ready", flush=True)
sys.stdin.readline()
for _ in range(5):
    work()
list(count_to(3))
list(map(int, "12345"))
thread = threading.Thread(target=in_thread)
thread.start()
thread.join()
idle()
"""
KEY, OTHER = (UNARY, "chat/completions"), (SINGLE, "chat/completions")


def asked(questions: socket.socket, answers: IO[bytes]) -> dict[str, int]:
    questions.sendall(b"?")
    return dict(orjson.loads(answers.readline()))


def counts_of(program: str, folder: Path) -> dict[str, int]:
    (folder / "counted_program.py").write_text(program)
    ours, theirs = socket.socketpair()
    with ours, ours.makefile("rb") as answers:
        command = [sys.executable, "-m", "tests.bench.counting", str(theirs.fileno()), "counted_program"]
        path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
        pipe, kept = subprocess.PIPE, (theirs.fileno(),)
        with subprocess.Popen(command, pass_fds=kept, stdin=pipe, stdout=pipe, env=path) as process:
            theirs.close()
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            counts = asked(ours, answers)
            process.stdin.write(b"begin\n")
            process.stdin.flush()
            while "__main__.idle" not in counts:
                counts = asked(ours, answers)
    assert process.returncode == 0
    return counts


def test_calls_and_resumptions_are_counted_in_all_threads(tmp_path: Path) -> None:
    counts = counts_of(PROGRAM, tmp_path)
    assert counts["__main__.work"] == 12
    assert counts["__main__.count_to"] == 4
    assert counts["__main__.in_thread"] == counts["__main__.idle"] == 1
    assert "tests.bench.counting.answer_questions" not in counts


def test_a_timer_in_one_repetition_is_not_part_of_the_median() -> None:
    repetitions = [Counter({"app.turn": 4}), Counter({"app.turn": 4, "app.tick": 9}), Counter({"app.turn": 4})]
    assert median(repetitions, 2) == {"app.turn": 2.0}


def test_an_excess_names_the_five_functions_that_grew_most() -> None:
    before = {f"app.f{number}": 10.0 for number in range(8)}
    now = {f"app.f{number}": 10.0 + number for number in range(8)} | {"app.new": 5.5}
    found = excesses({KEY: now, OTHER: now}, {" | ".join(KEY): before}, {KEY: 100, OTHER: 1000})
    assert [(excess.total, excess.limit) for excess in found] == [(113.5, 100)]
    grew = [("app.f7", 7.0), ("app.f6", 6.0), ("app.new", 5.5), ("app.f5", 5.0), ("app.f4", 4.0)]
    assert list(found[0].grew) == grew


def test_figures_within_their_limits_are_no_excess() -> None:
    assert not excesses({KEY: {"app.turn": 100.0}}, {}, {KEY: 100})
