"""Agents that tests of TRL's worker and sessions name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

from tokengrove.rollout.episodes import EpisodeEnded

begun: list[str] = []
"""The sessions whose agents have begun, in order."""
started = threading.Semaphore(0)
"""Released once for each session in `begun`."""
released = threading.Event()
"""What the agents wait for that wait."""


def begin(session_id: str) -> None:
    begun.append(session_id)
    started.release()


async def ask(base_url: str, http_client: Any, **more: Any) -> str:
    """One turn; return its text."""
    body = {"model": "any", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, **more}
    reply = (await http_client.post(f"{base_url}/chat/completions", json=body)).raise_for_status().json()
    return str(reply["choices"][0]["message"]["content"])


async def numbered(data: Mapping[str, Any], session_id: str, sample: int, base_url: str, http_client: Any) -> float:
    """Its reward is the number of the episode in its group. It raises where the row says so."""
    begin(session_id)
    await ask(base_url, http_client)
    if sample in data.get("fails", ()):
        raise ValueError(f"sample {sample} has failed")
    return float(sample)


tried: dict[int, str] = {}
"""By seed the first session of an episode of `flaky`."""


async def flaky(seed: int, session_id: str, base_url: str, http_client: Any) -> float:
    """Each episode fails when it is played for the first time."""
    await ask(base_url, http_client)
    if tried.setdefault(seed, session_id) == session_id:
        raise ConnectionError("its tool was away")
    begin(session_id)
    return 1.0


async def waits(session_id: str, base_url: str, http_client: Any) -> float:
    """A turn, and then nothing until it is cancelled."""
    await ask(base_url, http_client)
    begin(session_id)
    await asyncio.Event().wait()
    return 0.0


async def late(base_url: str, http_client: Any) -> float:
    """A turn, and then the end of its time."""
    await ask(base_url, http_client)
    raise EpisodeEnded("Timeout", "the agent's time is over")


async def blocks(session_id: str, base_url: str, http_client: Any) -> float:
    """It blocks the event loop, as no agent should."""
    await ask(base_url, http_client)
    begin(session_id)
    released.wait(60)
    return 0.0


async def cool(base_url: str, http_client: Any) -> float:
    """It asks for a sampling of its own."""
    await ask(base_url, http_client, temperature=0.1, top_p=0.2)
    return 1.0


def said(output: str) -> float:
    """A reward function: the length of the last answer."""
    return float(len(output))
