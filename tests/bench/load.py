"""The load of a bench: seeded texts, growing conversations, and an HTTP client that costs little CPU."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any

import orjson

from tests.bench.servers import REPLY_TOKENS, Server

SYSTEM_CHARACTERS = 1000
USER_CHARACTERS = 1500


class Connection(asyncio.Protocol):
    """HTTP/1.1 over one kept-alive connection: one request at a time, and only replies with a content-length."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._end = 0
        self._reply: asyncio.Future[bytes] | None = None
        self._transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._end:
            self._read_head()
        if self._end and len(self._received) >= self._end and self._reply is not None:
            reply, self._reply = self._reply, None
            reply.set_result(bytes(self._received))

    def _read_head(self) -> None:
        head, separator, _ = self._received.partition(b"\r\n\r\n")
        if separator:
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]
            self._end = len(head) + 4 + int(length)

    def connection_lost(self, error: Exception | None) -> None:
        if self._reply is not None:
            self._reply.set_exception(error or ConnectionResetError("the server closed the connection"))

    async def post(self, path: str, body: bytes) -> bytes:
        """Return the body of the answer. Raises RuntimeError for any status but 200."""
        return await self._ask(b"POST", path, body)

    async def get(self, path: str) -> bytes:
        """Return the body of the answer. Raises RuntimeError for any status but 200."""
        return await self._ask(b"GET", path, b"")

    async def _ask(self, method: bytes, path: str, body: bytes) -> bytes:
        self._received, self._end = bytearray(), 0
        self._reply = asyncio.get_running_loop().create_future()
        head = f"{path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: "
        self._transport.write(b"%s %s%d\r\n\r\n%s" % (method, head.encode(), len(body), body))
        answer = await self._reply
        head_bytes, _, content = answer.partition(b"\r\n\r\n")
        if not head_bytes.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head_bytes[:40]!r}: {content[:500]!r}")
        return content

    def close(self) -> None:
        self._transport.close()


async def connect(server: Server) -> Connection:
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", server.port)
    return connection


_PROSE = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one had not "
    "but what all were when we there can an your which their said if do will each about how up out them "
    "then she many some so these would other into has more her two like him see time could no make than "
    "first been its who now people my made over did down only way find use may water long little very "
    "after words called just where most know "
)
COMMON = _PROSE.split()
SYLLABLES = [
    first + last for first, last in product(("b", "d", "f", "g", "k", "l", "m", "n", "r", "st", "tr"), "aeiou")
]


class Words:
    """Seeded text: two of three words are common, as in prose; the third is a random string."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def text(self, characters: int) -> str:
        words: list[str] = []
        length = 0
        while length < characters:
            words.append(self._word())
            length += len(words[-1]) + 1
        return " ".join(words)[:characters]

    def _word(self) -> str:
        if self._random.random() < 2 / 3:
            return self._random.choice(COMMON)
        return "".join(self._random.choices(SYLLABLES, k=self._random.randint(2, 4)))


_numbers = count()


def new_path() -> str:
    """Return a path in a session that does not exist yet; an open server creates it."""
    return f"/bench-{os.getpid()}-{next(_numbers)}/v1/chat/completions"


class Conversation:
    """A growing chat. Each body extends the last by the reply and a user message, and only these two are encoded."""

    def __init__(self, words: Words, user_characters: int = USER_CHARACTERS, turns: int = 1) -> None:
        self.path = new_path()
        self._messages = _message("system", words.text(SYSTEM_CHARACTERS))
        self._questions = iter([_message("user", words.text(user_characters)) for _ in range(turns)])

    def next_body(self) -> bytes:
        self._messages += b"," + next(self._questions)
        return b'{"model":"bench","max_tokens":%d,"messages":[%s]}' % (REPLY_TOKENS, self._messages)

    def take(self, answer: bytes) -> None:
        self._messages += b"," + _message("assistant", orjson.loads(answer)["choices"][0]["message"]["content"])


def _message(role: str, content: str) -> bytes:
    return orjson.dumps({"role": role, "content": content})


@dataclass(slots=True)
class Series:
    """Latencies in ns and CPU time of the server in ns, pooled over the rounds; the rate of each round a second."""

    latencies: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    cpu_ns: int = 0

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def cpu_us(self) -> float:
        """CPU time of the server for a request."""
        return self.cpu_ns / len(self.latencies) / 1e3

    def quantile_ms(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] / 1e6


@dataclass(frozen=True, slots=True)
class Lane:
    """One connection of a load; it sends no more requests once the phase is over."""

    connection: Connection
    latencies: list[int]
    deadline_ns: int

    async def post(self, path: str, body: bytes) -> bytes | None:
        begun = time.perf_counter_ns()
        if begun > self.deadline_ns:
            return None
        answer = await self.connection.post(path, body)
        self.latencies.append(time.perf_counter_ns() - begun)
        return answer


Work = Callable[[Lane], Awaitable[None]]
Sent = list[tuple[str, bytes]]


def sending(requests: Sent) -> Work:
    async def work(lane: Lane) -> None:
        for path, body in requests:
            if await lane.post(path, body) is None:
                return

    return work


def conversing(conversation: Conversation, turns: int, sent: Sent) -> Work:
    """Add each reply to the next body, and keep the bodies for the bare handler."""

    async def work(lane: Lane) -> None:
        for _ in range(turns):
            body = conversation.next_body()
            if (answer := await lane.post(conversation.path, body)) is None:
                return
            sent.append((conversation.path, body))
            conversation.take(answer)

    return work


async def under_load(server: Server, works: list[Work], series: Series, phase_s: float) -> None:
    """Run all `works` concurrently, each on a separate connection."""
    connections = [await connect(server) for _ in works]
    latencies: list[int] = []
    cpu_ns = server.cpu_ns()
    begun = time.perf_counter_ns()
    lanes = [Lane(connection, latencies, begun + int(phase_s * 1e9)) for connection in connections]
    await asyncio.gather(*(work(lane) for work, lane in zip(works, lanes, strict=True)))
    series.rates.append(len(latencies) / (time.perf_counter_ns() - begun) * 1e9)
    series.cpu_ns += server.cpu_ns() - cpu_ns
    series.latencies += latencies
    for connection in connections:
        connection.close()
