"""The supervisor of several workers. Starts, deaths and stops of whole servers are tested in `tests/e2e`."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from proxy.serving import supervisor
from proxy.serving.stop import Ended
from proxy.serving.worker import Report
from proxy.settings import Settings
from tokengrove.errors import ConfigurationError


def test_a_worker_that_was_stopped_alone_is_heard_of_by_its_end() -> None:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0,), name="tokengrove-worker-3")
    process.start()
    theirs.send((Report.STOPPED, Ended(1, 2)))
    theirs.close()
    report, why = supervisor._hear(supervisor._Running(process, ours))
    assert report is Report.DIED and why == f"tokengrove-worker-3 (process {process.pid}) ended with exit code 0"


def test_a_worker_that_is_told_to_stop_just_after_its_fork_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = supervisor._work

    def told_at_once(*arguments: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        work(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(supervisor, "_work", told_at_once)
    monkeypatch.setattr(supervisor.worker, "work", lambda *_: time.sleep(60))
    watching = supervisor._Supervisor(Settings(workers=1), lambda *_: "", ("127.0.0.1", 0), tmp_path)
    with supervisor._signals(watching.stop):
        watching._start(0, 0)
        process = watching._workers[0].process
        process.join(20)
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGTERM


def test_a_database_that_refuses_is_told_once_before_any_worker_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor._Supervisor, "_start", lambda *_: pytest.fail("a worker is started"))
    settings = Settings(port=0, workers=2, engine="scripted", database_url="postgresql://127.0.0.1:1/none")
    with pytest.raises(ConfigurationError, match="cannot be opened"):
        supervisor.run(settings, lambda *_: "", print)
