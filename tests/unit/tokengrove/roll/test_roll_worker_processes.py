"""What the worker processes of ROLL's scheduler leave behind when the server fails too."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokengrove.client import ServerUnreachable
from tokengrove.client.retries import LEAVE_S
from tokengrove.roll.scheduler.worker_processes import WorkerProcesses


class Away:
    """A client whose calls fail with `error`."""

    def __init__(self, error: Exception) -> None:
        self._error, self.patience = error, list[float | None]()

    def run(self, steps: Any, *, retry_s: float | None = None) -> Any:
        steps.close()
        self.patience.append(retry_s)
        raise self._error


class Queue:
    """A queue that nobody calls but to fail it."""

    put = give_back = leave = wait_closed = None

    def __init__(self) -> None:
        self.failed: list[BaseException] = []

    def fail(self, error: BaseException) -> None:
        self.failed.append(error)


def workers(client: Away, queue: Queue) -> WorkerProcesses:
    config = SimpleNamespace(env_configs={0: {}, 1: {}}, system_envs={})
    given: Any = (queue, client, config)
    return WorkerProcesses(*given, processes=2)


@pytest.fixture(params=[ServerUnreachable("away"), RuntimeError("a bug")], ids=["away", "bug"])
def away(request: pytest.FixtureRequest) -> Iterator[Away]:
    yield Away(request.param)


def test_a_server_that_is_away_is_asked_once_and_briefly_at_the_end(away: Away) -> None:
    made = workers(away, Queue())
    made._deaths.update({0: "killed", 1: "killed"})
    try:
        made.close()
    except RuntimeError as error:
        assert str(error) == "a bug"
    assert away.patience == [LEAVE_S]
    assert not made._server._accepting.is_alive(), "the queue is still served"


def test_a_failure_while_a_dead_worker_is_cleared_away_fails_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(self: Any, ranks: list[int], seed: int) -> None:
        raise RuntimeError("a bug")

    queue = Queue()
    made = workers(Away(RuntimeError()), queue)
    monkeypatch.setattr(WorkerProcesses, "_play", fails)
    made.start(0)
    assert made.join() == []
    assert [str(error) for error in queue.failed] == ["a bug"]
    made.close()
