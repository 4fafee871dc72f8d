"""A process of agents that send chat completions over HTTP, all at once, each on its own connection.

It reads each arm of a bench as a line of JSON from standard input, writes a line of replies, and ends with its input.
While replies arrive it only collects their bytes, so that its own work delays none of them."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import orjson

from tests.bench.load import Connection
from tests.bench.rollouts import Arm, Reply, Workload

_FIRST_TEXT = re.compile(rb'"(?:reasoning_)?content":"[^"]')
_LAST_CHUNK = b"\r\n0\r\n\r\n"


class Agent(Connection):
    """A connection that also reads chunked replies and records when their first text arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.first_ns = 0

    def data_received(self, data: bytes) -> None:
        if not self.first_ns and _FIRST_TEXT.search(data):
            self.first_ns = time.monotonic_ns()
        if not self._end and (self._received[-len(_LAST_CHUNK) :] + data).endswith(_LAST_CHUNK):
            self._end = len(self._received) + len(data)
        super().data_received(data)

    def _read_head(self) -> None:
        if b"content-length:" in self._received.partition(b"\r\n\r\n")[0].lower():
            super()._read_head()


def stream_events(body: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events of a chunked event stream. Raises RuntimeError for an error event."""
    for line in b"".join(_unchunked(body)).split(b"\n"):
        if line.startswith(b"data: {"):
            event = orjson.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            yield event


def _unchunked(body: bytes) -> Iterator[bytes]:
    at = 0
    while size := int(body[at : (end := body.index(b"\r\n", at))], 16):
        yield body[end + 2 : end + 2 + size]
        at = end + 4 + size


def streamed_answer(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the message that the deltas add up to, and the usage."""
    texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
    usage: dict[str, Any] = {}
    for event in stream_events(body):
        usage = event["usage"] or usage
        for choice in event["choices"]:
            for name, parts in texts.items():
                parts.append(choice["delta"].get(name, ""))
    joined = {name: "".join(parts) for name, parts in texts.items()}
    return {"role": "assistant", **{name: text for name, text in joined.items() if text or name == "content"}}, usage


async def converse(port: int, workload: Workload, arm: Arm, session: int) -> list[Reply]:
    """Run all turns of one session; each request repeats the whole conversation, as agents send it."""
    _, agent = await asyncio.get_running_loop().create_connection(Agent, "127.0.0.1", port)
    head: dict[str, Any] = {"model": "bench", "max_tokens": workload.reply_tokens, "stream": arm.stream}
    if arm.stream:
        head["stream_options"] = {"include_usage": True}
    messages: list[dict[str, Any]] = []
    replies = []
    for turn, text in enumerate(workload.texts(arm.seed, session)):
        messages.append({"role": "user", "content": text})
        body = orjson.dumps({**head, "messages": messages})
        agent.first_ns, begun_ns = 0, time.monotonic_ns()
        answer = await agent.post(f"/{arm.name}-{session}/v1/chat/completions", body)
        ended_ns = time.monotonic_ns()
        message, usage = streamed_answer(answer) if arm.stream else _whole_answer(answer)
        messages.append(message)
        first_ns = agent.first_ns if arm.stream else 0
        replies.append(_reply(session, turn, (begun_ns, first_ns, ended_ns), usage))
    agent.close()
    return replies


def _whole_answer(body: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    reply = orjson.loads(body)
    return reply["choices"][0]["message"], reply["usage"]


def _reply(session: int, turn: int, times_ns: tuple[int, int, int], usage: dict[str, Any]) -> Reply:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Reply(session, turn, *times_ns, usage["prompt_tokens"], cached, usage["completion_tokens"])


async def run_sessions(port: int, workload: Workload, arm: Arm, sessions: Sequence[int]) -> list[Reply]:
    lists = await asyncio.gather(*(converse(port, workload, arm, session) for session in sessions))
    return list(chain.from_iterable(lists))


class Clients:
    """Processes of agents that share the sessions of an arm. They start once, so no arm includes their start-up."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        self._processes: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        pipe = asyncio.subprocess.PIPE
        for _ in range(self._count):
            command = (sys.executable, "-m", "tests.bench.clients", str(self._port))
            limit = 256 * 2**20  # one line holds the replies of all sessions
            process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, limit=limit)
            self._processes.append(process)

    async def run(self, workload: Workload, arm: Arm) -> list[Reply]:
        """Run all sessions at once. Raises RuntimeError if a process of agents ends."""
        shares = [range(workload.sessions)[index :: self._count] for index in range(self._count)]
        lists = await asyncio.gather(*map(self._ask, self._processes, [(workload, arm, list(s)) for s in shares]))
        return list(chain.from_iterable(lists))

    async def _ask(self, process: asyncio.subprocess.Process, work: tuple[Workload, Arm, list[int]]) -> list[Reply]:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(orjson.dumps(work) + b"\n")
        line = await process.stdout.readline()
        if not line:
            raise RuntimeError("a process of agents has ended; its error is above")
        return [Reply(*row) for row in orjson.loads(line)]

    async def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
            await process.wait()


def main() -> None:
    """Serve arms until standard input ends."""
    for line in sys.stdin:
        workload, arm, sessions = orjson.loads(line)
        replies = asyncio.run(run_sessions(int(sys.argv[1]), Workload(**workload), Arm(**arm), sessions))
        sys.stdout.write(orjson.dumps([reply.to_row() for reply in replies]).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
