"""Agents that tests of executors name by their paths: they run in this process and in others."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

from tokengrove.client import AsyncSession

_ASKED = {"model": "any", "messages": [{"role": "user", "content": "Name a tree."}]}


async def tree(task: Mapping[str, Any], session: AsyncSession, http_client: Any) -> float:
    """One turn, and then what the task says: `wait` for a file, `die`, `raise`, `leave`, `block` the event loop."""
    answer = await http_client.post(f"{session.base_url}/chat/completions", json=_ASKED)
    answer.raise_for_status()
    if "told" in task:
        _tell(Path(task["told"]), task.get("child", False))
    while _waits(task):
        await _a_moment()
    _do(task.get("then"))
    return 0.5


def blocking_tree(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """The same in a thread."""
    key = {"authorization": f"Bearer {api_key}"}
    httpx.post(f"{base_url}/chat/completions", json=_ASKED, headers=key, timeout=60).raise_for_status()
    if "told" in task:
        _tell(Path(task["told"]), task.get("child", False))
    while _waits(task):
        time.sleep(0.01)
    _do(task.get("then"))
    return 0.25


def process_id(task: Mapping[str, Any]) -> int:
    return os.getpid()


def _waits(task: Mapping[str, Any]) -> bool:
    return "wait" in task and not Path(task["wait"]).exists()


async def _a_moment() -> None:
    await asyncio.sleep(0.01)


def _tell(told: Path, child: bool) -> None:
    """Write the ids of this process, and of one that it starts, to a file."""
    names = [os.getpid()]
    if child:
        names.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid)
    part = told.with_suffix(".part")
    part.write_text(" ".join(map(str, names)))
    part.rename(told)


def _do(then: str | None) -> None:
    if then == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if then == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if then == "exit":
        os._exit(7)
    if then == "raise":
        raise LookupError("no such tree")
    if then == "leave":
        sys.exit("enough")
    if then == "block":
        time.sleep(600)
