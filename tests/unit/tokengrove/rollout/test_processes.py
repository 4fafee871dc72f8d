"""Functions in other processes: results, exceptions as text, and processes that die, hang, or are no longer needed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import until
from tests.unit.tokengrove.rollout import agents_of_processes as functions
from tokengrove.rollout import processes
from tokengrove.rollout.failures import AgentFailed, WorkerDied
from tokengrove.rollout.processes import ProcessPool, shared_pool

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPool]:
    pool = ProcessPool(2)
    yield pool
    pool.close()


def processes_of(pool: ProcessPool) -> list[int | None]:
    return [worker._process.pid for worker in pool._idle if worker._process is not None]


async def test_calls_return_and_use_at_most_so_many_processes(pool: ProcessPool) -> None:
    sums = await asyncio.gather(*(pool.run(functions.add, a=number, b=1) for number in range(8)))
    assert sums == list(range(1, 9))
    ids = set(await asyncio.gather(*(pool.run(functions.process_id) for _ in range(8))))
    assert len(ids) <= 2
    assert os.getpid() not in ids


async def test_variables_are_set_for_one_call_and_all_are_restored(pool: ProcessPool) -> None:
    told = await pool.run(functions.variable, variables={"HOME": "/mine", "PATH": None}, name="HOME", become="/other")
    assert told == "/mine"
    paths = [await pool.run(functions.variable, variables={"PATH": None}, name="PATH") for _ in range(2)]
    assert paths == [None, None]
    for name in ("HOME", "PATH"):
        assert {await pool.run(functions.variable, name=name) for _ in range(4)} == {os.environ.get(name)}


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("raise", "tests.unit.tokengrove.rollout.agents_of_processes.Refused", "not today"),
        ("leave", "SystemExit", "enough"),
        ("generate", "TypeError", "the result, of type generator, cannot be pickled"),
    ],
)
async def test_exceptions_cross_as_text_and_the_process_lives(
    pool: ProcessPool, how: str, kind: str, message: str
) -> None:
    with pytest.raises(AgentFailed, match=message) as failure:
        await pool.run(functions.fail, how=how)
    assert failure.value.kind == kind
    assert "Traceback" in failure.value.traceback
    assert failure.value.__notes__ == [f"In the other process:\n{failure.value.traceback}"]
    assert not isinstance(failure.value, WorkerDied)
    assert await pool.run(functions.add, a=1, b=1) == 2


@pytest.mark.parametrize(("how", "fate"), [("exit", "ended with exit code 7"), ("kill", "was killed by SIGKILL")])
async def test_a_process_that_dies_takes_only_its_own_call_with_it(pool: ProcessPool, how: str, fate: str) -> None:
    dying = pool.run(functions.fail, how=how)
    died, *sums = await asyncio.gather(
        dying, *(pool.run(functions.add, a=number, b=1) for number in range(4)), return_exceptions=True
    )
    assert isinstance(died, WorkerDied)
    assert fate in str(died)
    assert sums == [1, 2, 3, 4]


async def both_ids(told: Path) -> list[int]:
    """The ids of the process that hangs, and of the one that it has started."""
    await until(told.exists)
    text = await asyncio.to_thread(told.read_text)
    return [int(name) for name in text.split()]


async def test_a_call_that_takes_too_long_is_killed(pool: ProcessPool) -> None:
    with pytest.raises(TimeoutError, match=r"hang has not ended within 0.1 s"):
        await pool.run(functions.hang, timeout_s=0.1)
    assert await pool.run(functions.add, a=1, b=1) == 2


async def test_a_process_that_does_not_start_in_time_is_a_dead_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(1)
    monkeypatch.setattr(processes, "_START_S", 0.0)
    with pytest.raises(WorkerDied, match="had not started within 0 s"):
        await pool.run(functions.process_id)
    monkeypatch.undo()
    assert await pool.run(functions.process_id)
    pool.close()


async def test_a_call_that_is_cancelled_is_killed_with_all_that_it_started(pool: ProcessPool, tmp_path: Path) -> None:
    told = tmp_path / "told"
    call = asyncio.create_task(pool.run(functions.start_child_and_hang, told=str(told)))
    names = await both_ids(told)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await until(lambda: all(map(is_gone, names)))
    assert await pool.run(functions.add, a=1, b=1) == 2


PROGRAM = """
import asyncio, sys
from tokengrove.rollout.processes import ProcessPool
from tests.unit.tokengrove.rollout.agents_of_processes import start_child_and_hang
asyncio.run(ProcessPool(1).run(start_child_and_hang, told=sys.argv[1]))
"""


async def test_a_program_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    told = tmp_path / "told"
    program = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(told))
    names = await both_ids(told)
    program.kill()
    await program.wait()
    await until(lambda: all(map(is_gone, names)))


async def test_a_call_that_is_cancelled_while_it_waits_never_runs(tmp_path: Path) -> None:
    pool, told = ProcessPool(1), tmp_path / "told"
    running = asyncio.create_task(pool.run(functions.start_child_and_hang, told=str(told)))
    await until(told.exists)
    waiting = asyncio.create_task(pool.run(functions.start_child_and_hang, told=str(tmp_path / "never")))
    await asyncio.sleep(0)
    for call in (waiting, running):
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
    assert await pool.run(functions.add, a=1, b=1) == 2
    assert not (tmp_path / "never").exists()
    pool.close()


def is_gone(name: int) -> bool:
    try:
        return psutil.Process(name).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def test_close_ends_idle_processes_at_once_and_the_others_after_their_calls(tmp_path: Path) -> None:
    pool = ProcessPool(2)
    first = await pool.run(functions.process_id)
    assert processes_of(pool) == [first]
    pool.close()
    assert is_gone(first)
    second = await pool.run(functions.process_id)
    closing = threading.Thread(target=pool.close)
    third = asyncio.create_task(pool.run(functions.process_id))
    closing.start()
    assert await third
    await asyncio.to_thread(closing.join)
    pool.close()
    assert is_gone(second)
    assert processes_of(pool) == []


async def test_an_idle_process_that_was_killed_is_replaced() -> None:
    pool = ProcessPool(1)
    name = await pool.run(functions.process_id)
    psutil.Process(name).kill()
    await until(lambda: not pool._idle[0].is_usable())  # not all its threads end at one moment
    assert await pool.run(functions.process_id) != name
    pool.close()


def test_calls_may_come_from_several_event_loops(pool: ProcessPool) -> None:
    sums: list[int] = []

    def run() -> None:
        sums.append(asyncio.run(pool.run(functions.add, a=1, b=1)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [2] * 4


class Holds:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"a": Holds(client=Holds(lock=threading.Lock())), "b": 1}, r"a\.client\.lock cannot be sent"),
        ({"a": 1, "b": {"list": [1, 2, threading.Lock()]}}, r"b\['list'\]\[2\] cannot be sent"),
        ({"a": lambda: 1, "b": 1}, r"a cannot be sent .*lambda"),
    ],
    ids=["attribute", "item", "function"],
)
async def test_what_cannot_be_pickled_is_named(pool: ProcessPool, arguments: dict[str, Any], path: str) -> None:
    with pytest.raises(TypeError, match=path):
        await pool.run(functions.add, **arguments)


async def test_what_cannot_be_rebuilt_in_the_process_is_told(pool: ProcessPool) -> None:
    with pytest.raises(AgentFailed, match=r"cannot unpickle the call.*never again"):
        await pool.run(functions.add, a=functions.Unpicklable(), b=1)
    assert await pool.run(functions.add, a=1, b=1) == 2


def test_pools_of_one_size_are_shared() -> None:
    assert shared_pool(3) is shared_pool(3)
    assert shared_pool(3) is not shared_pool(4)
    with pytest.raises(ValueError, match="max_workers is 0"):
        shared_pool(0)


SCRIPT = """
import asyncio
from tokengrove.rollout.processes import ProcessPool

def double(number):
    return 2 * number

def work():
    print(asyncio.run(ProcessPool(1).run(double, number=21)))

"""


@pytest.mark.parametrize(
    ("begins", "by", "told"),
    [
        ('if __name__ == "__main__": work()', "file", "42"),
        ("work()", "file", "42"),
        ("work()", "stdin", "definitions of a notebook or of stdin must be in a module"),
    ],
)
def test_what_a_script_defines_reaches_its_processes(tmp_path: Path, begins: str, by: str, told: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT + begins)
    command = [sys.executable, *([str(file)] if by == "file" else ["-"])]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(command, input=file.read_text(), env=path, capture_output=True, text=True, check=False)
    assert told in run.stdout + run.stderr
    assert (run.returncode == 0) == (told == "42")
