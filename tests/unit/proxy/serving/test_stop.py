"""A stop tells what it waits for at once, when that has changed, every few seconds, and at its end."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from proxy.serving.stop import Ended, Left, Stop


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """The lines since the last call."""
    caplog.set_level(logging.INFO, "proxy.serving.stop")

    def since() -> list[str]:
        messages = list(caplog.messages)
        caplog.clear()
        return messages

    return since


def test_a_stop_tells_what_it_waits_for_at_once_when_that_changes_and_every_five_seconds(
    told: Callable[[], list[str]],
) -> None:
    times = [100.0]
    stop = Stop(8, Left(3, 1, 4), lambda: times[-1])
    assert told() == ["stopping: 3 turns, 1 export, 4 connections, up to 8 s"]
    for second in (101.0, 102.0, 103.0):
        times.append(second)
        stop.look(Left(3, 1, 4))
    assert told() == []
    times.append(104.0)
    stop.look(Left(1, 0, 1))
    assert told() == ["stopping: still 1 turn, 1 connection, up to 4 s more"]
    for second in (105.0, 106.0, 107.0, 108.0):
        times.append(second)
        stop.look(Left(1, 0, 1))
    assert told() == []
    times.append(109.0)
    stop.look(Left(1, 0, 1))
    assert told() == ["stopping: still 1 turn, 1 connection, up to 0 s more"]
    stop.interrupt(1)
    stop.look(Left())
    stop.end(Ended(finished=2, interrupted=1))
    assert told() == ["stopping: interrupted 1 turn", "stopped: 2 turns finished, 1 interrupted"]


def test_a_stop_of_an_idle_server_and_a_second_signal_are_told(told: Callable[[], list[str]]) -> None:
    stop = Stop(30, Left())
    stop.interrupt(0)
    stop.at_once()
    stop.end(Ended())
    assert told() == [
        "stopping: nothing runs",
        "stopping at once: a second signal came",
        "stopped: 0 turns finished, 0 interrupted",
    ]


def interpreted(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_a_process_that_has_stopped_runs_its_exit_handlers_and_frees_nothing() -> None:
    """The interpreter would free what torch and the other libraries hold, for longer than an idle server stops."""
    ended = interpreted(
        "import atexit\n"
        "from proxy.serving.stop import end_process\n"
        "class Held:\n"
        "    def __del__(self): print('freed')\n"
        "held = Held()\n"
        "atexit.register(print, 'handled')\n"
        "end_process()\n"
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "handled\n", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start_ends_the_process_with_a_line_and_waits_for_no_thread(number: signal.Signals) -> None:
    ended = interpreted(
        "import logging, os, threading\n"
        "from proxy.serving.stop import end_at_signal\n"
        "logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "end_at_signal()\n"
        f"os.kill(os.getpid(), {number.value})\n"
        "threading.Event().wait()\n"
    )
    assert (ended.returncode, ended.stderr) == (0, f"stopped by {number.name} during the start\n")


def test_the_limit_of_a_stop_is_a_number_for_collectors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.serving.stop")
    Stop(2.5, Left(1, 0, 1))
    (record,) = caplog.records
    assert record.args == {"turns": 1, "connections": 1, "limit_s": 2.5}
    assert record.getMessage() == "stopping: 1 turn, 1 connection, up to 2.5 s"
