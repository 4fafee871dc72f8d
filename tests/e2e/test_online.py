"""Users chat without end and rate answers later, receivers of webhooks fail, processes are killed: nothing is lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

from tests.e2e.load import check_database
from tests.e2e.online_users import TURNS_OF_EPISODE, Receiver, Users, flags, lost, receiving, run, settle
from tests.e2e.processes import server_process
from tests.e2e.test_workers import workers_of
from tests.support import free_port, until

USERS, TURNS = 8, 160


def check(users: Users, receiver: Receiver, database_url: str) -> None:
    assert lost(users, receiver, database_url) == {"turns": [], "rewards": [], "unrated": [], "ends": [], "scores": []}
    assert len(users.seen) == len(set(users.seen)) >= TURNS
    types = [each["type"] for each in receiver.events.values()]
    assert types.count("session.ended") >= len(users.seen) // TURNS_OF_EPISODE - USERS and "reward.late" in types
    assert receiver.forged == 0


async def test_a_killed_server_loses_no_turn_no_feedback_and_no_event(tmp_path: Path) -> None:
    chance, port, url = random.Random(0), free_port(), f"sqlite:///{tmp_path / 'served.db'}"
    async with receiving(chance) as receiver:
        users = Users(f"http://127.0.0.1:{port}", chance)
        with contextlib.ExitStack() as stack:

            async def kill_once() -> None:
                await until(lambda: len(users.seen) >= TURNS // 2)
                await asyncio.to_thread(first.kill)
                await asyncio.to_thread(stack.enter_context, server_process(tmp_path, *flags(receiver, port)))
                await until(lambda: len(users.seen) >= TURNS)

            first = await asyncio.to_thread(stack.enter_context, server_process(tmp_path, *flags(receiver, port)))
            await run(users, USERS, url, kill_once)
            await settle(users.url, receiver)
        check(users, receiver, url)
    await asyncio.to_thread(check_database, url)


async def test_a_killed_leader_of_workers_loses_no_turn_no_feedback_and_no_event(
    tmp_path: Path, postgres_url: str
) -> None:
    chance, port = random.Random(0), free_port()
    async with receiving(chance) as receiver:
        users, workers = Users(f"http://127.0.0.1:{port}", chance), ("--workers", "2", "--migrate")
        with contextlib.ExitStack() as stack:
            started = server_process(tmp_path, *flags(receiver, port, *workers), database_url=postgres_url)
            server = await asyncio.to_thread(stack.enter_context, started)

            async def kill_leader() -> None:
                await until(lambda: len(users.seen) >= TURNS // 2)
                os.kill(workers_of(server)[0], signal.SIGKILL)
                await until(lambda: len(users.seen) >= TURNS)

            await run(users, USERS, postgres_url, kill_leader)
            await settle(users.url, receiver)
            check(users, receiver, postgres_url)
