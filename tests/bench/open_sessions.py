"""A server with many open sessions that mostly wait: memory of a session, and what the others notice of them.

Each count of sessions has a new server in front of a simulated engine server. Every session is started, and has some
turns with tools and tool calls; then it waits. A few sessions go on, at a pace, as in a run whose other agents wait for
their tools. Memory is the growth of the process since a few sessions were open. "Beyond" is what a session takes beyond
15 bytes a token and the text of its messages once; it is right if all sessions are still in memory, which they leave
10 minutes after their last use. The server has one core, the others share the second.

Run `python -m tests.bench.open_sessions [100 10000] [--turns 6] [--split]` from the root of the repository. `--split`
also prints which objects a session holds, by type. No figure fails the bench."""

from __future__ import annotations

import argparse
import asyncio
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from tests.bench.load import Connection, Words, connect
from tests.bench.overhead import assets_tokenizer, machine
from tests.bench.servers import Server, allow_open_files, free_port, on_core, server_process, serving
from tests.bench.sizing import memory_mb
from tests.bench.streams import Stalls
from tests.bench.upstream import model_of, upstream_server, word_tokens

WORDS = 100
SYSTEM_CHARACTERS, TASK_CHARACTERS, RESULT_CHARACTERS = 2000, 2500, 1500
ARGUMENTS = '{"command": "ls -la src && cat README", "cwd": "/w"}'
CALL = f'\n<tool_call>\n{{"name": "run_command", "arguments": {ARGUMENTS}}}\n</tool_call>'
TOKEN_BYTES = 15
FIRST = 10
"""Sessions before memory counts: the first turns import and cache what all share."""

LANES = 16
MEASURED_TURNS = 200
LISTINGS = 40
WATCHED_S = 20.0
GOING_ON = 40
MEMORY_BYTES = 16 * 2**30


def tools() -> list[dict[str, Any]]:
    """Return the tools of an agent that works in a folder."""
    names = {
        "run_command": ("Run a command in the container and return its output.", ("command", "cwd")),
        "read_file": ("Read a part of a file, with line numbers.", ("path", "first_line", "last_line")),
        "edit_file": ("Replace a text in a file; the text must occur once.", ("path", "old", "new")),
        "search": ("Search all files of a folder for a regular expression.", ("pattern", "folder", "glob")),
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {
                    "type": "object",
                    "properties": {each: {"type": "string", "description": f"The {each} to use."} for each in fields},
                    "required": list(fields[:1]),
                },
            },
        }
        for name, (description, fields) in names.items()
    ]


@dataclass(slots=True)
class Agent:
    """One session, and what it has sent. `messages` is emptied when it waits, except for those that go on."""

    number: int
    path: str
    words: Words
    messages: list[dict[str, Any]]
    text: int = 0
    tokens: int = 0

    def body(self, max_tokens: int) -> bytes:
        asked = {"model": "bench", "max_tokens": max_tokens, "tools": TOOLS, "messages": self.messages}
        return orjson.dumps(asked)

    def take(self, answer: bytes) -> None:
        """Add the answer of a turn, and the result of its tool call."""
        reply = orjson.loads(answer)
        message = reply["choices"][0]["message"]
        self.add({"role": "assistant", "content": message["content"], "tool_calls": message["tool_calls"]})
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"]}
        self.add({**result, "content": self.words.text(RESULT_CHARACTERS)})
        self.tokens = reply["usage"]["total_tokens"]

    def add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.text += len(message["content"] or "")
        self.text += sum(len(call["function"]["arguments"]) for call in message.get("tool_calls") or ())


TOOLS = tools()


@dataclass(slots=True)
class Figures:
    """What one count of sessions took. Memory in MB, times in ms; `pauses` of the collector by generation."""

    sessions: int
    tokens: float
    text: float
    in_memory: int
    first_mb: float
    end_mb: float
    open_s: float
    open_cpu_s: float
    turn_cpu_ms: float = 0.0
    listing_ms: float = 0.0
    listing_cpu_ms: float = 0.0
    stall_ms: float = 0.0
    load_pauses: dict[int, float] = field(default_factory=dict)
    pauses: dict[int, float] = field(default_factory=dict)
    sweeps: dict[str, float] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def session_kb(self) -> float:
        return (self.end_mb - self.first_mb) * 1e3 / max(self.sessions - FIRST, 1)

    @property
    def beyond_kb(self) -> float:
        return self.session_kb - (TOKEN_BYTES * self.tokens + self.text) / 1e3


class Watched:
    """The questions to a server that runs under `tests.bench.watching`."""

    def __init__(self, server: Server, questions: socket.socket) -> None:
        self.server = server
        self._questions, self._answers = questions, questions.makefile("rb")

    def ask(self, question: bytes) -> dict[str, Any]:
        self._questions.sendall(question)
        found: dict[str, Any] = orjson.loads(self._answers.readline())
        return found


@contextmanager
def watched_proxy(folder: Path, tokenizer: Path | None, engine: str) -> Iterator[Watched]:
    ours, theirs = socket.socketpair()
    port = free_port()
    options = ["--session-memory-bytes", str(MEMORY_BYTES), "--session-idle-s", "3600"]
    arguments = [str(theirs.fileno()), "tokengrove", *serving(port, folder, tokenizer, engine), *options]
    inherited = (theirs.fileno(),)
    with ours, server_process(["-m", "tests.bench.watching", *arguments], port, folder, inherited=inherited) as server:
        theirs.close()
        yield Watched(server, ours)


class Bench:
    """One server and its sessions of `turns`. `reply_tokens`: of every answer, which ends with a tool call."""

    def __init__(self, watched: Watched, reply_tokens: int, turns: int) -> None:
        self._watched, self._server, self._reply_tokens = watched, watched.server, reply_tokens
        self._turns_each = turns
        self._going_on: list[Agent] = []

    async def run(self, count: int, split: bool) -> Figures:
        lanes = [await connect(self._server) for _ in range(LANES)]
        first = await self._open(lanes, range(min(FIRST, count)), 1)
        self._watched.ask(b"p")
        first_mb, begun_s, cpu_ns = memory_mb(self._server, "VmRSS"), time.monotonic(), self._server.cpu_ns()
        opened = first + await self._open(lanes, range(FIRST, count), max(count // GOING_ON, 1))
        took_s, cpu_s = time.monotonic() - begun_s, (self._server.cpu_ns() - cpu_ns) / 1e9
        loaded = self._watched.ask(b"p")
        end_mb = memory_mb(self._server, "VmRSS")
        tokens, text = (sum(each) / len(opened) for each in zip(*opened, strict=True))
        figures = Figures(count, tokens, text, loaded["sessions"], first_mb, end_mb, took_s, cpu_s)
        figures.load_pauses = _longest(loaded["pauses"])
        await self._measure(lanes[0], figures)
        if split:
            figures.held = self._watched.ask(b"h")
        for lane in lanes:
            lane.close()
        return figures

    async def _open(self, lanes: Sequence[Connection], numbers: range, keep_each: int) -> list[tuple[int, int]]:
        """Open sessions. Return tokens and characters of each; every `keep_each`th goes on later."""
        found: list[tuple[int, int]] = []
        left = iter(numbers)

        async def work(lane: Connection) -> None:
            for number in left:
                agent = await self._start(lane, number)
                for _ in range(self._turns_each):
                    agent.take(await lane.post(agent.path, agent.body(self._reply_tokens)))
                sent = agent.messages[-1]["content"]  # the last result was not sent
                found.append((agent.tokens, agent.text - len(sent)))
                if not number % keep_each and len(self._going_on) < GOING_ON:
                    self._going_on.append(agent)

        await asyncio.gather(*map(work, lanes))
        return found

    async def _start(self, lane: Connection, number: int) -> Agent:
        words = Words(number)
        group, repeat = divmod(number, 8)
        start = {"task_id": f"task-{group}", "group_id": f"group-{group}", "metadata": {"run": "bench", "try": repeat}}
        reply = orjson.loads(await lane.post("/rl/start_session", orjson.dumps(start)))
        agent = Agent(number, f"/{reply['base_url'].split('/', 3)[3]}/chat/completions", words, [])
        agent.add({"role": "system", "content": Words(0).text(SYSTEM_CHARACTERS)})
        agent.add({"role": "user", "content": words.text(TASK_CHARACTERS)})
        return agent

    async def _measure(self, lane: Connection, figures: Figures) -> None:
        stalls = Stalls(self._server)
        watching = asyncio.create_task(stalls.watch())
        begun_ns = time.monotonic_ns()
        figures.turn_cpu_ms = await self._turns(lane)
        figures.listing_ms, figures.listing_cpu_ms = await self._listings(lane)
        until = time.monotonic() + WATCHED_S
        while time.monotonic() < until:  # the memory and the idle sweeps run meanwhile, and the server is not quiet
            await self._turn(lane, self._going_on[0])
            await asyncio.sleep(1.0)
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        figures.stall_ms = stalls.longest_ms(begun_ns, time.monotonic_ns())
        seen = self._watched.ask(b"p")
        figures.pauses, figures.sweeps = _longest(seen["pauses"]), _longest(seen["sweeps"])

    async def _turn(self, lane: Connection, agent: Agent) -> None:
        """A turn that continues the conversation; each is a sibling of the one before."""
        agent.messages[-1] = {**agent.messages[-1], "content": agent.words.text(RESULT_CHARACTERS)}
        await lane.post(agent.path, agent.body(self._reply_tokens))

    async def _turns(self, lane: Connection) -> float:
        cpu_ns = self._server.cpu_ns()
        for number in range(MEASURED_TURNS):
            await self._turn(lane, self._going_on[number % len(self._going_on)])
        return (self._server.cpu_ns() - cpu_ns) / MEASURED_TURNS / 1e6

    async def _listings(self, lane: Connection) -> tuple[float, float]:
        cpu_ns, begun_ns = self._server.cpu_ns(), time.monotonic_ns()
        for _ in range(LISTINGS):
            await lane.get("/rl/sessions?limit=100&order=newest&include=summary")
        spent = time.monotonic_ns() - begun_ns, self._server.cpu_ns() - cpu_ns
        return spent[0] / LISTINGS / 1e6, spent[1] / LISTINGS / 1e6


def _longest(seen: Sequence[tuple[Any, int]]) -> dict[Any, float]:
    """Return the longest of each name, in ms."""
    found: dict[Any, float] = {}
    for name, ns in seen:
        found[name] = max(found.get(name, 0.0), ns / 1e6)
    return found


def calling_tokens(folder: Path) -> list[int]:
    """Return the ids of an answer of words and a tool call."""
    from tokenizers import Tokenizer

    words = word_tokens(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [words[at % len(words)] for at in range(WORDS)] + tokenizer.encode(CALL, add_special_tokens=False).ids


def run(counts: Sequence[int], turns: int, tokenizer: Path | None, *, split: bool) -> list[Figures]:
    ids = calling_tokens(model_of(tokenizer))
    allow_open_files()
    found = []
    for count in counts:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            with (
                upstream_server(folder, ids) as upstream,
                watched_proxy(folder, tokenizer, upstream.url) as watched,
                on_core(1),
            ):
                found.append(uvloop.run(Bench(watched, len(ids), turns).run(count, split)))
    return found


def report(figures: Sequence[Figures], turns: int, console: Console) -> None:
    table = Table(title=f"Open sessions of {turns} turns", title_justify="left")
    rows: dict[str, list[str]] = {
        "tokens of a session": [f"{each.tokens:.0f}" for each in figures],
        "text of its messages, kB": [f"{each.text / 1e3:.1f}" for each in figures],
        "in memory": [str(each.in_memory) for each in figures],
        "memory, MB": [f"{each.first_mb:.0f} to {each.end_mb:.0f}" for each in figures],
        "memory of a session, kB": [f"{each.session_kb:.1f}" for each in figures],
        "beyond tokens and text, kB": [f"{each.beyond_kb:.1f}" for each in figures],
        "CPU of a turn, ms": [f"{each.turn_cpu_ms:.2f}" for each in figures],
        "listing of 100, ms": [f"{each.listing_ms:.1f} (CPU {each.listing_cpu_ms:.1f})" for each in figures],
        "longest stall, ms": [f"{each.stall_ms:.0f}" for each in figures],
        "longest collection by generation, ms of CPU": [_by_name(each.pauses) for each in figures],
        "the same while they opened": [_by_name(each.load_pauses) for each in figures],
        "longest sweep, ms of CPU": [_by_name(each.sweeps) for each in figures],
        "seconds to open, of CPU": [f"{each.open_s:.0f}, {each.open_cpu_s:.0f}" for each in figures],
    }
    table.add_column("sessions")
    for each in figures:
        table.add_column(str(each.sessions), justify="right")
    for name, row in rows.items():
        table.add_row(name, *row)
    console.print(table)
    for each in figures:
        if each.held:
            console.print(_split(each))


def _by_name(longest: dict[Any, float]) -> str:
    return ", ".join(f"{name} {ms:.1f}" for name, ms in sorted(longest.items())) or "none"


def _split(figures: Figures) -> Table:
    types: dict[str, tuple[float, float]] = figures.held["types"]
    table = Table(title=f"A session of {figures.sessions}, {figures.held['sessions']} in memory", title_justify="left")
    table.add_column("type")
    table.add_column("objects", justify="right")
    table.add_column("bytes", justify="right")
    for name, (count, size) in sorted(types.items(), key=lambda each: -each[1][1])[:25]:
        table.add_row(name, f"{count:.1f}", f"{size:,.0f}")
    table.add_row("all", f"{sum(c for c, _ in types.values()):.1f}", f"{sum(s for _, s in types.values()):,.0f}")
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("counts", type=int, nargs="*", default=[100, 10_000])
    parser.add_argument("--turns", type=int, default=6, help="of each session, before it waits (6)")
    parser.add_argument("--split", action="store_true", help="also print what a session holds, by type of object")
    options = parser.parse_args()
    console, tokenizer = Console(width=140), assets_tokenizer()
    console.print(machine())
    report(run(options.counts, options.turns, tokenizer, split=options.split), options.turns, console)


if __name__ == "__main__":
    main()
