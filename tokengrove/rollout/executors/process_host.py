"""A worker process, as seen from the main process. It plays several episodes at once on its own event loop."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import pickle
import socket
import subprocess
from contextlib import suppress
from typing import Any

from tokengrove.rollout import child_process
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors import watched
from tokengrove.rollout.executors.host import HostDied
from tokengrove.rollout.executors.messages import receive, send
from tokengrove.rollout.executors.results import end_lost_session, failed
from tokengrove.rollout.function_worker import Sent
from tokengrove.rollout.pickling import check_picklable
from tokengrove.rollout.script import script_of_this_process

START_S = 300.0
"""Seconds that a worker may take to import the agent's module: enough for torch on a network drive."""
_CANCEL_S, _CLOSE_S = 30.0, 10.0


class ProcessHost:
    """One worker process. `start_s`: seconds that it may take to create its first agent."""

    def __init__(self, start_s: float = START_S) -> None:
        self._start_s = start_s
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._ended: asyncio.Task[None] | None = None
        self._died: str | None = None

    async def start(self, plan: EpisodePlan) -> None:
        try:
            payload = _pickled(plan)
        except TypeError:
            payload = b""  # `play` reports the reason
        try:
            await self._connect()
            async with asyncio.timeout(self._start_s):
                await self._ask("prepare", payload)
        except TimeoutError:
            await self.kill(f"had not imported its agent within {self._start_s:g} s and was killed")
            raise HostDied(self._died) from None
        except asyncio.CancelledError:
            await self.kill("was no longer needed")
            raise

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        try:
            payload = _pickled(plan)
        except TypeError as error:
            return failed(plan, "agent", str(error))
        number = next(self._numbers)
        answer = self._asked("play", number, payload)
        try:
            told = await asyncio.shield(answer)
        except asyncio.CancelledError:
            self._send("cancel", number)
            await to_the_end(self._cancelled(plan, answer))
            raise
        if told is None:
            return failed(plan, "cancelled", "the episode cancelled itself")
        if isinstance(told, str):
            await end_lost_session(plan, "agent", told)
            return failed(plan, "agent", f"the worker process cannot play the episode: {told}")
        return EpisodeResult(**told)

    async def ping(self) -> int:
        if self._process is None or self._process.poll() is not None:
            await self._over()  # its children may hold the connection open
        return int(await self._ask("ping"))

    async def kill(self, reason: str) -> None:
        self._died = self._died or reason
        if self._process is not None and self._ended is None:
            child_process.kill(self._process)
        await self._over()

    async def close(self) -> None:
        with suppress(HostDied, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._ask("close")
        await self.kill("was closed")

    async def _connect(self) -> None:
        """Start the process. Raises HostDied if the system cannot start it."""
        ours, its = socket.socketpair()
        try:
            with its:
                self._process = child_process.started("tokengrove.rollout.executors.episode_worker", its.fileno())
        except OSError as error:
            ours.close()
            self._died = f"cannot be started: {error}"
            raise HostDied(self._died) from None
        watched.watch(self._process.pid)
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._reading = asyncio.create_task(self._read(reader))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Resolve the waiting calls with the answers of the process, until it is gone."""
        while (message := await receive(reader)) is not None:
            number, value = json.loads(message)
            if (answer := self._answers.pop(number, None)) is not None and not answer.done():
                answer.set_result(value)
        await self._over()

    async def _over(self) -> None:
        """Wait until the process and its children are gone, and the waiting calls have failed with the reason."""
        if self._process is not None:
            if self._ended is None:
                self._ended = asyncio.ensure_future(self._end(self._process))
            await to_the_end(_done(self._ended))

    async def _end(self, process: subprocess.Popen[bytes]) -> None:
        ended = await asyncio.to_thread(child_process.fate, process)
        child_process.kill(process)  # its children, and the process itself if it only closed its connection
        await asyncio.to_thread(process.wait)
        watched.forget(process.pid)
        if self._writer is not None:
            self._writer.close()
        self._died = self._died or ended
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(HostDied(self._died))

    async def _ask(self, verb: str, payload: bytes = b"") -> Any:
        return await self._asked(verb, next(self._numbers), payload)

    def _asked(self, verb: str, number: int, payload: bytes) -> asyncio.Future[Any]:
        if self._died is not None:
            raise HostDied(self._died)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._send(verb, number, payload)
        return answer

    def _send(self, verb: str, number: int, payload: bytes = b"") -> None:
        assert self._writer is not None
        send(self._writer, pickle.dumps((verb, number, payload)))

    async def _cancelled(self, plan: EpisodePlan, answer: asyncio.Future[Any]) -> None:
        """Wait until the process has ended a cancelled episode. If it does not, end the session from here."""
        try:
            async with asyncio.timeout(_CANCEL_S):
                await answer
        except (HostDied, TimeoutError):
            await end_lost_session(plan, "cancelled", "cancelled")


async def _done(task: asyncio.Task[None]) -> None:
    await asyncio.wait([task])


def _pickled(plan: EpisodePlan) -> bytes:
    """The pickled plan, with a key of its agent: plans with the same key share an agent.

    Raises TypeError, which names the part of the plan that cannot be pickled.
    """
    try:
        key = hashlib.blake2b(pickle.dumps(plan.agent)).digest()
        return pickle.dumps(Sent(pickle.dumps((plan, key)), script_of_this_process()))
    except Exception as error:
        check_picklable("arguments", plan.agent.arguments)
        check_picklable("plan", plan)
        raise TypeError(str(error)) from error
