"""Agents and functions that tests send to other processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI


class Refused(Exception):
    """Cannot be unpickled: its constructor takes more than its text, as those of SDKs do."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class Asks:
    """Asks the model once through the variables of its environment, as agents of mode subproc do."""

    def __init__(self, then: str = "return") -> None:
        self.then = then

    async def run(self, data: dict[str, Any]) -> Any:
        with OpenAI(base_url=os.environ.get("OPENAI_BASE_URL"), api_key="DUMMY", max_retries=0) as client:
            reply = client.chat.completions.create(model="default", messages=data["messages"])
            if self.then == "error":
                client.chat.completions.create(model="default", messages=[])
        if self.then == "exit":
            os._exit(7)
        if self.then == "hang":
            hang(data.get("told"))
        return {reply.id: 0.5}


class KeepsClient:
    """Sends all its calls through one client of the process, as openai-agents does, and leaves a task behind."""

    async def run(self, data: dict[str, Any]) -> float:
        others = len(asyncio.all_tasks()) - 1
        background.append(asyncio.create_task(asyncio.sleep(600)))
        client = AsyncOpenAI(http_client=client_of_process(), max_retries=0)
        await client.chat.completions.create(model="default", messages=data["messages"])
        return float(others)


background: list[asyncio.Task[None]] = []


@cache
def client_of_process() -> httpx.AsyncClient:
    return httpx.AsyncClient()


def hang(told: str | None = None) -> None:
    """Hang; make the file `told` first."""
    if told is not None:
        Path(told).touch()
    time.sleep(600)


def add(a: int, b: int) -> int:
    return a + b


def variable(name: str, become: str | None = None) -> str | None:
    before = os.environ.get(name)
    if become is not None:
        os.environ[name] = become
    return before


def fail(how: str) -> Any:
    if how == "raise":
        raise Refused("not today", code=3)
    if how == "leave":
        sys.exit("enough")
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return (number for number in range(3))  # cannot be pickled


def process_id() -> int:
    return os.getpid()


def start_child_and_hang(told: str) -> None:
    """Start a process, write both ids to the file `told`, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path = Path(told)
    path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".part").rename(path)
    hang()


class Unpicklable:
    """Refuses to be rebuilt."""

    def __reduce__(self) -> Any:
        return _refuse, ()


def _refuse() -> None:
    raise ValueError("never again")
