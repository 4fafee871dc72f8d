"""One run of a scenario with a seed: the order of events, what must hold at the end, and what a failure shows."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import io
import logging
import shutil
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from tests.conftest import MEMORY
from tests.torture.command import Outcome
from tests.torture.loop import Hung, SeededLoop
from tests.torture.seam import EPOCH_S, stepped

_T = TypeVar("_T")

_STUCK_S = 120.0
"""Seconds of real time after which a run that computes without end shows all stacks and ends the process."""
_LINES = 40
_END_S = 3600.0
"""Virtual seconds in which each scenario ends."""


class World:
    """What a scenario has: the seed's choices, a folder, and tasks that must end."""

    def __init__(self, loop: SeededLoop, folder: Path) -> None:
        self.loop, self.random, self.folder = loop, loop.random, folder

    async def some_time(self, most_s: float) -> None:
        """Wait for none to `most_s` seconds."""
        kind = self.random.random()
        if kind < 0.3:
            for _ in range(self.random.randrange(20)):
                await asyncio.sleep(0)
        elif kind < 0.9:
            await asyncio.sleep(self.random.uniform(0.0, most_s))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. Raises AssertionError after an hour."""
        for _ in range(360_000):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the condition was not met within an hour")

    async def all(self, *work: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run `work` at the same time until all of it has ended; raise the first error at once."""
        tasks = [asyncio.create_task(each) for each in work]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in left:
            task.cancel()
        for task in done:
            task.result()
        return [task.result() for task in tasks]

    async def abandon_some(self, work: Coroutine[Any, Any, _T], most_s: float, chance: float = 0.5) -> _T | None:
        """Run `work`, or cancel it somewhere; None if it was cancelled."""
        task, abandoned = asyncio.create_task(work), False
        if self.random.random() < chance:
            await self.some_time(most_s)
            abandoned = task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            assert abandoned, "nobody has cancelled it"
            return None


Scenario = Callable[[World], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    """Register a scenario under the name of its function."""
    SCENARIOS[function.__name__] = function
    return function


def run(name: str, seed: int) -> Outcome:
    """Run a scenario in the order that `seed` chooses."""
    folder = Path(tempfile.mkdtemp(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None))
    loop = SeededLoop(f"{name} {seed}")
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
    gc.disable()  # when it ran would decide when generators end
    try:
        with stepped(loop), warnings.catch_warnings(), _logged() as lines:
            warnings.simplefilter("error")
            failure = _played(loop, World(loop, folder), SCENARIOS[name])
            if failure:
                failure += "".join(f"log: {line}\n" for line in lines)
    finally:
        gc.enable()
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(name, seed, failure, loop.steps, loop.order)


@contextmanager
def _logged() -> Iterator[Collection[str]]:
    """The latest lines of the log, which is shown after a failure only."""
    lines = deque[str](maxlen=_LINES)

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.created - EPOCH_S:.3f} {record.getMessage()} {record.args or ''}")

    handler, loggers = Handler(), [logging.getLogger(name) for name in ("proxy", "tokengrove")]
    propagated = [logger.propagate for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield lines
    finally:
        for logger, propagate in zip(loggers, propagated, strict=True):
            logger.removeHandler(handler)
            logger.propagate = propagate


def _played(loop: SeededLoop, world: World, scenario: Scenario) -> str:
    task: asyncio.Task[None] = loop.create_task(_whole(world, scenario), name="scenario")  # type: ignore[arg-type]
    try:
        loop.run_until_complete(task)
    except Hung as error:
        return f"{error}\n{_stacks(loop)}"
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        shown = "".join(traceback.format_exception(error))
        return shown + "".join(f"also: {other!r}\n" for other in loop.failures)
    finally:
        _close(loop)
    return "".join(_told(failure) for failure in loop.failures)


async def _whole(world: World, scenario: Scenario) -> None:
    loop = world.loop
    playing = asyncio.ensure_future(scenario(world))
    done, _ = await asyncio.wait([playing], timeout=_END_S)
    assert done, f"the scenario has not ended after {_END_S:.0f} s\n{_stacks(loop)}"
    playing.result()
    for _ in range(1000):  # what was cancelled at the end
        if not (len(asyncio.all_tasks()) > 1 or loop.fibres or loop.busy_threads()):
            break
        await asyncio.sleep(0.01)
    left = [str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not left, f"tasks are left: {left}\n{_stacks(loop)}"
    assert not loop.fibres, f"threads are left: {[fibre.name for fibre in loop.fibres]}\n{_stacks(loop)}"
    assert not loop.busy_threads(), "work is left in a thread pool"
    gc.collect()


def _close(loop: SeededLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()


def _told(failure: BaseException | str) -> str:
    return failure + "\n" if isinstance(failure, str) else "".join(traceback.format_exception(failure))


def _stacks(loop: SeededLoop) -> str:
    """Where all tasks and threads are."""
    shown = io.StringIO()
    for task in asyncio.all_tasks(loop):
        task.print_stack(file=shown)
    for fibre in loop.fibres:
        shown.write(f"Thread {fibre.name}:\n{fibre.stack()}")
    return shown.getvalue()
