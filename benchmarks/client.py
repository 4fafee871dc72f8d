"""The agents of the load: they play sessions over chat completions, and record what they read and when."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from benchmarks.scoring import Key
from benchmarks.sessions import Message, Play, Session

_TAG = re.compile(r"^\s*#(\d+)\.(\d+)\.(\d+)\s")
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Address:
    """Where the agent of a session sends its requests: the URL of chat completions, and headers."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)


Open = Callable[[aiohttp.ClientSession, int], Awaitable[Address]]


@dataclass(slots=True)
class Read:
    """An answer that was read whole. Times are of the monotonic clock, in ns.

    `arrivals`: of a stream, when each event with text was read, and the characters of text so far.
    """

    key: Key
    began: int
    ended: int
    parent: tuple[int, int] | None = None
    arrivals: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Played:
    """What all agents of a phase read, and why requests failed."""

    read: list[Read] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def seen(self) -> set[Key]:
        return {read.key for read in self.read}

    @property
    def continued(self) -> dict[Key, tuple[int, int]]:
        """Of each answer that continues another: turn and attempt of that one."""
        return {read.key: read.parent for read in self.read if read.parent is not None}


class Failed(Exception):
    """An answer that is no whole chat completion."""


Retry = Callable[[], Awaitable[bool]]


@dataclass(slots=True)
class Load:
    """How sessions are played.

    `lanes`: sessions at a time. `stream`: None for what the shape says. `on_read`: called after each answer. `retry`:
    awaited after a failure, before the session is opened again and the same request is sent again; it returns False
    if the session should end. None: it ends.
    """

    open: Open
    lanes: int = 16
    stream: bool | None = None
    on_read: Callable[[Played], None] = lambda _: None
    retry: Retry | None = None

    async def play(self, sessions: Iterable[Session]) -> Played:
        """Play all sessions."""
        played, waiting = Played(), iter(sessions)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30.0)
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=2**20) as http:

            async def lane() -> None:
                for session in waiting:
                    await self._session(http, session, played)

            await asyncio.gather(*(lane() for _ in range(self.lanes)))
        return played

    async def _session(self, http: aiohttp.ClientSession, session: Session, played: Played) -> None:
        play, keys = Play(session), list[Key]()
        stream = session.shape.stream if self.stream is None else self.stream
        try:
            address = await self.open(http, session.number)
            for index, turn in enumerate(session.shape.turns):
                body = play.body(index, stream)
                message, read = await self._turn(http, session, address, body)
                keys.append(read.key)
                if turn.parent is not None:
                    read.parent = keys[turn.parent][1:]
                play.take(body, message)
                played.read.append(read)
                self.on_read(played)
        except (TimeoutError, aiohttp.ClientError, OSError, Failed) as error:
            played.failures.append(f"session {session.number}: {type(error).__name__}: {error}"[:300])

    async def _turn(
        self, http: aiohttp.ClientSession, session: Session, address: Address, body: Message
    ) -> tuple[Message, Read]:
        content = orjson.dumps(body)
        ask = _streamed if body.get("stream") else _whole
        while True:
            try:
                return await ask(http, address, content)
            except (aiohttp.ClientError, OSError, Failed):
                if self.retry is None or not await self.retry():
                    raise
            address = await self.open(http, session.number)


async def _whole(http: aiohttp.ClientSession, address: Address, content: bytes) -> tuple[Message, Read]:
    began = time.monotonic_ns()
    async with http.post(address.url, data=content, headers=_headers(address)) as response:
        answer = await response.read()
    ended = time.monotonic_ns()
    if response.status != 200:
        raise Failed(f"status {response.status}: {answer[:250].decode(errors='replace')}")
    message = orjson.loads(answer)["choices"][0]["message"]
    return message, Read(_key(message), began, ended)


async def _streamed(http: aiohttp.ClientSession, address: Address, content: bytes) -> tuple[Message, Read]:
    began = time.monotonic_ns()
    parts, calls, arrivals = list[str](), dict[int, Message](), list[tuple[int, int]]()
    characters, finished = 0, False
    async with http.post(address.url, data=content, headers=_headers(address)) as response:
        if response.status != 200:
            raise Failed(f"status {response.status}: {(await response.read())[:250].decode(errors='replace')}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[6:])
            if "error" in event:
                raise Failed(f"error in a stream: {line[:250].decode(errors='replace')}")
            for choice in event.get("choices") or []:
                delta = choice.get("delta") or {}
                if text := delta.get("content"):
                    parts.append(text)
                    characters += len(text)
                    arrivals.append((time.monotonic_ns(), characters))
                for call in delta.get("tool_calls") or []:
                    _add_call(calls, call)
                finished = finished or choice.get("finish_reason") is not None
    if not finished:
        raise aiohttp.ClientPayloadError("the stream ended before its finish reason")
    message: Message = {"role": "assistant", "content": "".join(parts)}
    if calls:
        message["tool_calls"] = [calls[place] for place in sorted(calls)]
    return message, Read(_key(message), began, time.monotonic_ns(), None, arrivals)


def _add_call(calls: dict[int, Message], part: Mapping[str, Any]) -> None:
    call = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    call["id"] = part.get("id") or call["id"]
    for name in ("name", "arguments"):
        call["function"][name] += (part.get("function") or {}).get(name) or ""


def _key(message: Mapping[str, Any]) -> Key:
    found = _TAG.match(message.get("content") or "")
    if found is None:
        raise Failed(f"an answer without the tag of the engine: {str(message)[:200]}")
    session, turn, attempt = map(int, found.groups())
    return session, turn, attempt


def _headers(address: Address) -> dict[str, str]:
    return {"content-type": "application/json", **address.headers}
