"""The turns and other generations that run: their limit, where they wait, and how they are stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from proxy.engine.gate import Gate
from proxy.resources.places import Places
from proxy.resources.senders import Sender
from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.telemetry.groups import TurnMetrics
from proxy.telemetry.timeline import Timeline
from proxy.turns.turn import Turn
from proxy.types import TurnRequest
from proxy.workers.attempt_table import WorkerAttempts
from tokengrove.errors import TooManyRequests

T = TypeVar("T")


class RunningTurns:
    """The turns that run in this process, requests that wait at the gate, and generations outside of sessions.

    `places`: the limit on choices that run at once. `worker_attempts`: this worker's entries in the table of all
    workers; None if it is the only one.
    """

    def __init__(
        self,
        places: Places,
        settings: Settings,
        metrics: TurnMetrics,
        worker_attempts: WorkerAttempts | None,
    ) -> None:
        self._places, self._worker_attempts = places, worker_attempts
        self._most, self._most_outside = settings.max_turns_in_flight, settings.agent_max_requests
        self._outside = 0
        self._turns: set[Turn] = set()
        metrics.in_flight.watch(self._turns.__len__)
        self._unrecorded: set[asyncio.Task[Any]] = set()
        self._arriving = 0

    @property
    def busy(self) -> bool:
        """True while at least one turn is running or about to start."""
        return bool(self._turns or self._unrecorded or self._arriving)

    @property
    def count(self) -> int:
        """The number of turns and other generations that run."""
        return len(self._turns) + len(self._unrecorded)

    def of(self, session: LiveSession) -> list[Turn]:
        """The turns of a session that are running in this process."""
        return [turn for turn in self._turns if turn.session is session]

    def uses(self, route: str) -> bool:
        """Whether turns of a route run in this process."""
        return any(turn.interaction.route == route for turn in self._turns)

    def add(self, turn: Turn) -> None:
        """Count a turn that starts."""
        self._turns.add(turn)
        if turn.request.outside:
            self._outside += 1

    def discard(self, turn: Turn) -> None:
        """Stop counting a turn."""
        self._turns.discard(turn)
        if turn.request.outside:
            self._outside -= 1

    def check_room(self, request: TurnRequest) -> None:
        """Raise TooManyRequests if the turns of this request would exceed `--max-turns-in-flight`.

        Those of agents outside, also of agents that have left, have a limit of their own: `--agent-max-requests`.
        """
        if request.outside and self._outside + request.n > self._most_outside:
            raise TooManyRequests(
                f"{self._outside} turns of agents are running (--agent-max-requests); try again", retry_after_s=1.0
            )
        elsewhere = self._worker_attempts.turns_elsewhere() if self._worker_attempts is not None else 0
        if len(self._turns) + len(self._unrecorded) + self._arriving + request.n + elsewhere > self._most:
            raise TooManyRequests(
                f"{self._most} turns are running (--max-turns-in-flight); try again", retry_after_s=1.0
            )

    async def arrive(self, session: LiveSession, timeline: Timeline, gate: Gate) -> None:
        """Wait until a gate admits requests.

        A waiting request counts against the limit of turns in flight, and keeps its session in use.
        """
        self._arriving += 1
        session.waiting += 1
        timeline.held = time.monotonic()
        try:
            await gate.enter()
            timeline.let_in = time.monotonic()
        finally:
            self._arriving -= 1
            session.waiting -= 1
            session.touch()

    async def place(self, sender: Sender) -> None:
        """Wait for a place among the running choices. `leave` gives it back."""
        if not self._places.take_now(sender):
            await self._places.take(sender)

    def leave(self, sender: Sender) -> None:
        """Give a place back."""
        self._places.give_back(sender)

    def run_unrecorded(self, request: TurnRequest, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run a generation outside of sessions, within the same limits of turns and places. Raises TooManyRequests.

        The shutdown waits for it and cancels it like a turn.
        """
        try:
            self.check_room(request)
        except TooManyRequests:
            work.close()
            raise
        task = asyncio.create_task(self._run_placed(request.sender, work))
        self._unrecorded.add(task)
        task.add_done_callback(self._unrecorded.discard)
        task.add_done_callback(lambda _: work.close())  # it may have been cancelled before it ran
        return task

    def cancel_in(self, session: LiveSession) -> None:
        """Cancel the running turns of a deleted or withdrawn session. Their clients get SessionNotFound or
        SessionClosed.
        """
        for turn in self.of(session):
            if not turn.committing:
                turn.cancel()

    async def drain(self, timeout_s: float) -> int:
        """Wait up to `timeout_s` seconds for everything that runs, then cancel the rest.

        Turns that are being committed are not cancelled. Returns how many were cancelled.
        """
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + timeout_s
        while (tasks := self._tasks()) and (left_s := ends_at - loop.time()) > 0:  # turns may start while it waits
            await asyncio.wait(tasks, timeout=left_s)
        slow = [turn for turn in self._turns if not turn.committing]
        others = list(self._unrecorded)
        for turn in slow:
            turn.cancel()
        for task in others:
            task.cancel()
        await asyncio.gather(*self._tasks(), return_exceptions=True)
        return len(slow) + len(others)

    def _tasks(self) -> list[asyncio.Task[Any]]:
        return [*(turn.ended for turn in self._turns), *self._unrecorded]

    async def _run_placed(self, sender: Sender, work: Coroutine[Any, Any, T]) -> T:
        await self.place(sender)
        try:
            return await work
        finally:
            self.leave(sender)
