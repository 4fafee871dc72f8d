"""The places of episodes on hosts. Hosts start when they are needed, are watched, and are replaced when they die.

An episode gets a place on a running host, never on a starting one: a cluster may have no room for a new host for hours.
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
    """The maximum number of hosts, and the number of episodes that each plays at once.

    `spread`: start a host for each waiting episode, even if hosts that start will have room. `look_s`: seconds between
    pings of a host. A host that does not answer a ping within `patience` such intervals is killed. Intervals are
    counted instead of seconds, so that time in which this program was suspended does not count.
    """

    hosts: int
    places: int
    spread: bool = True
    look_s: float = 5.0
    patience: int = 12


class Seat:
    """A host. `load`: the number of episodes with a place on it. Only a host in the state `open` gets more."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.load = 0
        self.state: Literal["starts", "open", "retired", "gone"] = "starts"


class Places:
    """The hosts of one event loop. `make` creates a host."""

    def __init__(self, make: Callable[[], Host], shape: Shape) -> None:
        self._make, self._shape = make, shape
        self._seats: list[Seat] = []
        self._waiting: deque[tuple[asyncio.Future[Seat], EpisodePlan]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._ends: set[asyncio.Task[None]] = set()

    async def take(self, plan: EpisodePlan) -> Seat:
        """Wait for a place on a running host. Raises HostDied if none can be started. The caller gives it back."""
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
        """Remove a host that has died. Another one is started when it is needed."""
        seat.state = "gone"
        if seat in self._seats:
            self._seats.remove(seat)
        self._assign()

    async def close(self) -> None:
        """Close all hosts. No episodes may be left."""
        tasks, seats, self._seats = list(self._tasks), self._seats, []
        for task in tasks:
            task.cancel()
        starting = [seat.host.kill("the executor was closed") for seat in seats if seat.state == "starts"]
        running = [seat.host.close() for seat in seats if seat.state != "starts"]
        await asyncio.gather(*tasks, *starting, *running, *self._ends, return_exceptions=True)

    def _assign(self) -> None:
        """Give free places to waiting episodes, on the host with the fewest episodes; start hosts for the others."""
        while self._next_waiting() and (seat := self._free()) is not None:
            seat.load += 1
            self._waiting.popleft()[0].set_result(seat)
        while self._next_waiting() and self._needs_host():
            seat = Seat(self._make())
            self._seats.append(seat)
            self._do(self._start(seat, self._waiting[0][1]), self._tasks)

    def _next_waiting(self) -> bool:
        """Whether an episode waits. Cancelled ones are removed."""
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
        """The number of hosts, without those that only finish their episodes."""
        return sum(seat.state != "retired" for seat in self._seats)

    async def _start(self, seat: Seat, plan: EpisodePlan) -> None:
        try:
            await seat.host.start(plan)
        except HostDied as died:
            return self._not_started(seat, str(died))
        except Exception as error:  # of the machine or the cluster, such as too many open files
            await seat.host.kill("could not be started")
            return self._not_started(seat, exit_reason(error))
        seat.state = "open"
        self._do(self._watch(seat), self._tasks)
        self._assign()

    def _not_started(self, seat: Seat, reason: str) -> None:
        """Remove the host. If there is no other one, fail the waiting episodes."""
        logger.warning("a worker could not be started: %s", reason)
        if self._number() == 1:
            while self._next_waiting():
                self._waiting.popleft()[0].set_exception(HostDied(reason))
        self.lost(seat)

    async def _watch(self, seat: Seat) -> None:
        """Ping the host repeatedly; kill it if it does not answer."""
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
        """Give no more places on a host with many threads of ended episodes, or with any while it has no episode.

        Such threads end only with their process, which the host's other episodes need until they end.
        """
        if seat.state == "open" and (threads >= self._shape.places or (threads and not seat.load)):
            logger.info("a worker is replaced: %d threads of ended episodes still run in it", threads)
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
