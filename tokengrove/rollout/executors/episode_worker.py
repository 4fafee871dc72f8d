"""The worker process: it plays the episodes that it receives, all at once, and returns their results as JSON.

The first message is processed before the event loop runs. It contains the agent, whose module may block, or run its own
event loop, when it is imported.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import pickle
import socket
import struct
import sys
import threading
from functools import partial
from typing import Any

from tokengrove.client.exit_reason import exit_reason
from tokengrove.rollout.episodes import EpisodePlan
from tokengrove.rollout.executors.agents import Agents
from tokengrove.rollout.executors.messages import receive, send
from tokengrove.rollout.executors.open_files import allow_open_files
from tokengrove.rollout.function_worker import Sent, die_with_the_other_side, rebuilt
from tokengrove.rollout.script import import_script
from tokengrove.rollout.threads import left

logger = logging.getLogger(__name__)


def main() -> None:
    """Answer until the other side closes the connection or is gone."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=die_with_the_other_side, args=[connection.fileno()], daemon=True).start()
    allow_open_files()
    agents = Agents()
    first = _first(connection)
    _prepare(agents, first[2])
    asyncio.run(_Worker(agents).serve(connection, first[1]))


def _first(connection: socket.socket) -> tuple[str, int, bytes]:
    """The first message, read without an event loop. Ends the process if there is none."""
    with connection.makefile("rb", buffering=0) as file:
        size = struct.unpack("!I", _exactly(file, 4))[0]
        message: tuple[str, int, bytes] = pickle.loads(_exactly(file, size))
    return message


def _exactly(file: Any, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        if not (part := file.read(size - len(parts))):
            os._exit(0)
        parts += part
    return bytes(parts)


def _prepare(agents: Agents, payload: bytes) -> None:
    """Create the agent of the first plan. If this fails, each of its episodes reports the reason."""
    try:
        plan, key = _plan(payload)
        agents.make(plan.agent, key)
    except Exception:
        logger.debug("the first agent cannot be made", exc_info=True)


def _plan(payload: bytes) -> tuple[EpisodePlan, bytes]:
    """Unpickle a plan and the key of its agent. The script of the program is imported if needed."""
    sent: Sent = pickle.loads(payload)
    plan: EpisodePlan
    plan, key = rebuilt(sent)
    named = (plan.agent.target, plan.reward or "", *plan.scorers)
    if any(name.startswith("__main__") for name in named) and "__mp_main__" not in sys.modules:
        import_script(sent.script)
    return plan, key


class _Worker:
    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._episodes: dict[int, asyncio.Task[None]] = {}

    async def serve(self, connection: socket.socket, first: int) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._tell(first, None)
        while (message := await receive(reader)) is not None:
            verb, number, payload = pickle.loads(message)
            if verb == "close":
                await self._close(number)
            self._do(verb, number, payload)

    def _do(self, verb: str, number: int, payload: bytes) -> None:
        if verb == "play":
            task = asyncio.create_task(self._play(number, payload))
            self._episodes[number] = task
            task.add_done_callback(partial(self._ended, number))
        elif verb == "cancel" and number in self._episodes:
            self._episodes[number].cancel()
        elif verb == "ping":
            self._tell(number, left())

    async def _play(self, number: int, payload: bytes) -> None:
        try:
            result = await self._agents.play(*_plan(payload))
            self._tell(number, result.as_json())
        except Exception as error:
            logger.exception("an episode cannot be played, or its result cannot be sent")
            self._tell(number, exit_reason(error))

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        """Answer for an episode that was cancelled, also before it began."""
        del self._episodes[number]
        if task.cancelled():
            self._tell(number, None)

    async def _close(self, number: int) -> None:
        """Close the agents and exit. Threads that still run would keep the process alive."""
        await self._agents.close()
        self._tell(number, None)
        await self._writer.drain()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _tell(self, number: int, value: Any) -> None:
        send(self._writer, json.dumps([number, value]).encode())
