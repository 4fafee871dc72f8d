"""The places of episodes on hosts: hosts start when they are needed, are watched, and are replaced when they die.

An episode goes to a host that runs, never to one that still starts: a cluster may have no room for that one for hours.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

from tokengrove.client.exit_reason import exit_reason
from tokengrove.rollout.episodes import EpisodePlan
from tokengrove.rollout.executors.host import Host, HostDied

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shape:
    """How many hosts there may be and how many episodes each plays at once.

    `spread`: start a host for each episode that waits, not only when those that start would be full. `look_s`: how
    often each is asked whether it answers; one that leaves `patience` looks in a row unanswered is killed. Looks are
    counted, not seconds: the time in which this program itself was suspended does not count.
    """

    hosts: int
    places: int
    spread: bool = True
    look_s: float = 5.0
    patience: int = 12


class Seat:
    """A host. `load`: how many episodes have a place on it. `state`: only one that is `open` gets more of them."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.load = 0
        self.state: Literal["starts", "open", "retired", "gone"] = "starts"


class Places:
    """Of one event loop."""

    def __init__(self, make: Callable[[], Host], shape: Shape) -> None:
        self._make, self._shape = make, shape
        self._seats: list[Seat] = []
        self._waiting: deque[tuple[asyncio.Future[Seat], EpisodePlan]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def take(self, plan: EpisodePlan) -> Seat:
        """A place on a host that runs. Raises HostDied if none can be started. Give it back afterwards."""
        place: asyncio.Future[Seat] = asyncio.get_running_loop().create_future()
        self._waiting.append((place, plan))
        self._assign()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.give_back(place.result())
            raise

    def give_back(self, seat: Seat) -> None:
        seat.load -= 1
        self._end_if_retired(seat)
        self._assign()

    def lost(self, seat: Seat) -> None:
        """Forget a host that has died; another one is started when it is needed."""
        seat.state = "gone"
        if seat in self._seats:
            self._seats.remove(seat)
        self._assign()

    async def close(self) -> None:
        """Close all hosts. There are no episodes any more."""
        tasks, seats, self._seats = list(self._tasks), self._seats, []
        for task in tasks:
            task.cancel()
        starting = [seat.host.kill("the executor was closed") for seat in seats if seat.state == "starts"]
        running = [seat.host.close() for seat in seats if seat.state != "starts"]
        await asyncio.gather(*tasks, *starting, *running, *self._ends, return_exceptions=True)

    def _assign(self) -> None:
        """Give free places to those that wait, on the host with the fewest episodes; start hosts for the others."""
        while self._next_waiting() and (seat := self._free()) is not None:
            seat.load += 1
            self._waiting.popleft()[0].set_result(seat)
        while self._next_waiting() and self._needs_host():
            seat = Seat(self._make())
            self._seats.append(seat)
            self._do(self._start(seat, self._waiting[0][1]), self._tasks)

    def _next_waiting(self) -> bool:
        """Whether an episode waits; those that were cancelled do not."""
        while self._waiting and self._waiting[0][0].done():
            self._waiting.popleft()
        return bool(self._waiting)

    def _free(self) -> Seat | None:
        free = [seat for seat in self._seats if seat.state == "open" and seat.load < self._shape.places]
        return min(free, key=lambda seat: seat.load, default=None)

    def _needs_host(self) -> bool:
        starting = sum(seat.state == "starts" for seat in self._seats)
        coming = starting if self._shape.spread else starting * self._shape.places
        return coming < len(self._waiting) and self._number() < self._shape.hosts

    def _number(self) -> int:
        """How many hosts there are, without those that only end their episodes."""
        return sum(seat.state != "retired" for seat in self._seats)

    async def _start(self, seat: Seat, plan: EpisodePlan) -> None:
        try:
            await seat.host.start(plan)
        except HostDied as died:
            return self._not_started(seat, str(died))
        except Exception as error:  # of the machine or the cluster, such as one without a free file descriptor
            await seat.host.kill("could not be started")
            return self._not_started(seat, exit_reason(error))
        seat.state = "open"
        self._do(self._watch(seat), self._tasks)
        self._assign()

    def _not_started(self, seat: Seat, reason: str) -> None:
        """Forget the host. If there is no other one, those that wait would wait in vain."""
        logger.warning("a worker could not be started: %s", reason)
        if self._number() == 1:
            while self._next_waiting():
                self._waiting.popleft()[0].set_exception(HostDied(reason))
        self.lost(seat)

    async def _watch(self, seat: Seat) -> None:
        """Ask the host again and again whether it answers; kill one that does not."""
        while seat.state != "gone":
            ping = asyncio.ensure_future(seat.host.ping())
            try:
                if not await self._answered(ping):
                    seconds = self._shape.look_s * self._shape.patience
                    await seat.host.kill(f"did not answer for {seconds:g} s and was killed: an agent blocks it")
                    return self.lost(seat)
                self._retire_if_worn(seat, ping.result())
            except HostDied:
                return self.lost(seat)
            finally:
                ping.cancel()
            await asyncio.sleep(self._shape.look_s)

    async def _answered(self, ping: asyncio.Future[int]) -> bool:
        for _ in range(self._shape.patience):
            if (await asyncio.wait([ping], timeout=self._shape.look_s))[0]:
                return True
        return False

    def _retire_if_worn(self, seat: Seat, threads: int) -> None:
        """Play no more on a host where many threads run on after their episodes, or any while no episode is there.

        Threads cannot be ended without their process, which the episodes that play on it need until they are over.
        """
        if seat.state == "open" and (threads >= self._shape.places or (threads and not seat.load)):
            logger.info("a worker is replaced: %d threads of episodes that are over still run in it", threads)
            seat.state = "retired"
            self._end_if_retired(seat)
            self._assign()

    def _end_if_retired(self, seat: Seat) -> None:
        if seat.state == "retired" and not seat.load:
            self._do(seat.host.close(), self._ends)
            self.lost(seat)

    def _do(self, step: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.ensure_future(step)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
