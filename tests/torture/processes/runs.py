"""A scenario with the choices of a seed, which has to end in time."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import random
import signal
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from tests.conftest import MEMORY
from tests.torture.command import Outcome
from tests.torture.processes.place import Place
from tests.torture.processes.rollouts import rollouts_that_are_interrupted
from tests.torture.processes.servers import (
    models_that_stop,
    pauses_and_weights,
    servers_that_end,
    trainers_that_race,
    workers_that_are_killed,
)

_LIMIT_S = 120.0
_LINES = 60

Scenario = Callable[[Place], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {
    function.__name__: function
    for function in (
        servers_that_end,
        workers_that_are_killed,
        pauses_and_weights,
        trainers_that_race,
        models_that_stop,
        rollouts_that_are_interrupted,
    )
}


def run(name: str, seed: int) -> Outcome:
    """Play a scenario with the choices of a seed."""
    with tempfile.TemporaryDirectory(prefix="torture-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        place = Place(random.Random(f"{name} {seed}"), Path(folder))
        try:
            asyncio.run(_within_limit(place, SCENARIOS[name]))
        except Exception:
            lines = [line for line in place.output.splitlines() if " info    turn " not in line]
            shown = "".join(f"server: {line}\n" for line in lines[-_LINES:])
            return Outcome(name, seed, traceback.format_exc() + shown)
    return Outcome(name, seed, "")


async def _within_limit(place: Place, scenario: Scenario) -> None:
    """Play a scenario. One that hangs shows the stacks of its server and its own tasks."""
    playing = asyncio.ensure_future(scenario(place))
    await asyncio.wait([playing], timeout=_LIMIT_S)
    if not playing.done():
        for task in asyncio.all_tasks():
            task.print_stack()
        faulthandler.dump_traceback()
        if place.process is not None and place.process.alive:
            os.kill(place.process.pid, signal.SIGABRT)
            await asyncio.to_thread(place.process.wait)
        playing.cancel()
        await asyncio.wait([playing])
        raise AssertionError(f"the scenario has not ended after {_LIMIT_S:g} s")
    playing.result()
