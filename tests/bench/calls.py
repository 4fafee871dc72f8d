"""How many Python functions the server enters for a turn and for a streamed token, all threads together, one client.

A count does not depend on how busy the machine is, so a test run can hold it. The server runs as in production: its own
process, uvicorn, HTTP, a SQLite file; its engine is a simulated SGLang server in another process, or scripted. Each
function's figure is its median over repetitions, so a timer that runs now and then does not change it.

Run `python -m tests.bench.calls` from the root of the repository. `--functions` also prints which functions were
entered; `--check` ends with 1 if a limit is exceeded, and names the functions that grew since `--write` was run."""

from __future__ import annotations

import argparse
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from tests.bench.load import Words
from tests.bench.overhead import assets_tokenizer
from tests.bench.servers import REPLY_TOKENS, Server, free_port, server_process, serving
from tests.bench.upstream import Pace, model_of, upstream_server, word_tokens

BASELINE = Path(__file__).with_suffix(".json")
CHARACTERS = 2500
LAST_TURN = 20
PIECE_TOKENS = 32
REPEATS = 21
SETTLING_STEPS = 3
HELD_BACK_S = 0.25
IDLE_S = 2.0
SHOWN_FUNCTIONS = 40
GREW_MOST = 5

UNARY, LATER, SCRIPTED = "unary turn", f"turns 2 to {LAST_TURN}", "unary turn, scripted"
STREAM = f"streamed turn, {REPLY_TOKENS} tokens in one part"
SINGLE, PIECES = "single token", f"token in pieces of {PIECE_TOKENS}"
TOGETHER = f"token, {PIECE_TOKENS} parts a read"
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"
LIMITS: Mapping[tuple[str, str], float] = {
    (UNARY, CHAT): 445,
    (UNARY, RESPONSES): 470,
    (UNARY, MESSAGES): 470,
    (LATER, CHAT): 480,
    (STREAM, CHAT): 482,
    (SINGLE, CHAT): 28,
    (PIECES, CHAT): 2,
    (TOGETHER, CHAT): 2,
}

Counts = Mapping[str, float]
"""Entries by function."""


def body_of(api: str, text: str, tokens: int, *, stream: bool = False) -> dict[str, Any]:
    """Return a request of one user message."""
    limit = "max_output_tokens" if api == RESPONSES else "max_tokens"
    asked = {"input": text} if api == RESPONSES else {"messages": [{"role": "user", "content": text}]}
    return {"model": "bench", limit: tokens, "stream": stream, **asked}


class Client:
    """One kept-alive connection, which waits for each answer."""

    def __init__(self, server: Server) -> None:
        self._socket = socket.create_connection(("127.0.0.1", server.port))

    def post(self, path: str, body: Any) -> Any:
        """Return the JSON of the answer. Raises RuntimeError unless the status is 200."""
        self.send(path, body)
        answer = bytearray()
        while not (content := _content(answer)):
            answer += self._receive()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path} failed: {bytes(answer[:2000])!r}")
        return orjson.loads(content)

    def stream(self, path: str, body: Any) -> None:
        """Read an answer of unknown length to its end. Raises RuntimeError unless the status is 200."""
        self.send(path, body)
        answer = self._receive()
        while not answer.endswith(b"\r\n0\r\n\r\n"):
            answer += self._receive()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{path} failed: {answer[:2000]!r}")

    def send(self, path: str, body: Any) -> None:
        content = orjson.dumps(body)
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: "
        self._socket.sendall(b"%s%d\r\n\r\n%s" % (head.encode(), len(content), content))

    def some(self) -> bytes:
        """Return what has arrived of a stream, or nothing if the server holds it back."""
        self._socket.settimeout(HELD_BACK_S)
        try:
            return self._receive()
        except TimeoutError:
            return b""
        finally:
            self._socket.settimeout(None)

    def _receive(self) -> bytes:
        data = self._socket.recv(2**20)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data

    def close(self) -> None:
        self._socket.close()


def _content(answer: bytearray) -> bytes | None:
    """Return the body of an answer if it is complete."""
    head, separator, content = answer.partition(b"\r\n\r\n")
    if not separator:
        return None
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return bytes(content) if len(content) >= length else None


class Counted:
    """A proxy whose function entries are counted, and a client of it."""

    def __init__(self, server: Server, questions: socket.socket) -> None:
        self.client = Client(server)
        self._questions = questions
        self._answers = questions.makefile("rb")
        self._idle: Mapping[str, float] = {}
        self._sessions = 0

    def entries(self) -> Counter[str]:
        """Return the entries so far, once the server has nothing left to do."""
        self._questions.sendall(b"?")
        return Counter(orjson.loads(self._answers.readline()))

    def watch_timers(self) -> None:
        """Measure what the server does by itself, which `during` leaves out: more of it falls into a slower turn."""
        before, begun = self.entries(), time.monotonic()
        time.sleep(IDLE_S)
        after, seconds = self.entries(), time.monotonic() - begun
        self._idle = {name: count / seconds for name, count in (after - before).items()}

    def during(self, work: Callable[[], Any]) -> Counter[str]:
        before, begun = self.entries(), time.monotonic()
        work()
        counts, seconds = self.entries() - before, time.monotonic() - begun
        for name, rate in self._idle.items():
            counts[name] -= min(counts[name], round(rate * seconds))
        return counts

    def new_path(self, api: str) -> str:
        """Return a path in a session that does not exist yet."""
        self._sessions += 1
        return f"/calls-{self._sessions}/v1/{api}"


@contextmanager
def counted_proxy(folder: Path, tokenizer: Path | None, engine: str) -> Iterator[Counted]:
    ours, theirs = socket.socketpair()
    port = free_port()
    arguments = [str(theirs.fileno()), "tokengrove", *serving(port, folder, tokenizer, engine)]
    inherited = (theirs.fileno(),)
    with ours, server_process(["-m", "tests.bench.counting", *arguments], port, folder, inherited=inherited) as server:
        theirs.close()
        counted = Counted(server, ours)
        yield counted
        counted.client.close()


def median(repetitions: Iterable[Counter[str]], divisor: int = 1) -> Counts:
    """Return each function's median, divided; functions that most repetitions do not enter are left out."""
    repeated = list(repetitions)
    medians = {name: statistics.median_low(counts[name] for counts in repeated) for name in set().union(*repeated)}
    return {name: count / divisor for name, count in medians.items() if count}


def first_turn(proxy: Counted, api: str, words: Words, *, stream: bool = False) -> Counts:
    """Entries of the first turn of a session."""
    ask = proxy.client.stream if stream else proxy.client.post

    def turn() -> Any:
        return ask(proxy.new_path(api), body_of(api, words.text(CHARACTERS), REPLY_TOKENS, stream=stream))

    for _ in range(3):
        turn()
    proxy.watch_timers()
    return median(proxy.during(turn) for _ in range(REPEATS))


def later_turns(proxy: Counted, words: Words) -> Counts:
    """Entries of a turn that continues a conversation."""
    path, body = proxy.new_path(CHAT), body_of(CHAT, words.text(CHARACTERS), REPLY_TOKENS)

    def turn() -> None:
        answer = proxy.client.post(path, body)["choices"][0]["message"]
        question = {"role": "user", "content": words.text(CHARACTERS // 4)}
        body["messages"] += [{"role": "assistant", "content": answer["content"]}, question]

    turn()
    return median(proxy.during(turn) for _ in range(LAST_TURN - 1))


@dataclass(frozen=True, slots=True)
class Steps:
    """What a stream sends at a time: `parts` of `part_tokens` each. `count`: how often, while it is counted."""

    part_tokens: int
    parts: int
    count: int

    @property
    def pace(self) -> Pace:
        return Pace(part_tokens=self.part_tokens, stepped=True, step_parts=self.parts)

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.part_tokens * self.parts


STREAMED = {SINGLE: Steps(1, 1, 8), PIECES: Steps(PIECE_TOKENS, 1, 2), TOGETHER: Steps(1, PIECE_TOKENS, 2)}


def streamed(proxy: Counted, upstream: Client, api: str, words: Words, steps: Steps) -> Counts:
    """Entries per token of a stream that sends on once the client has what was sent before."""
    tokens = steps.tokens * (REPEATS * steps.count + 2 * SETTLING_STEPS)

    def step(times: int) -> int:
        events = 0
        for _ in range(times):
            upstream.post("/step", {})
            events += proxy.client.some().count(b"data: ")
        return events

    def counted_steps() -> Counter[str]:
        before = proxy.entries()
        events = step(steps.count)
        if events < steps.count:
            raise RuntimeError(f"{api}: what was sent in {steps.count} steps arrived as {events} events")
        return proxy.entries() - before

    upstream.post("/pace", steps.pace.to_json())
    proxy.client.send(proxy.new_path(api), body_of(api, words.text(CHARACTERS), tokens, stream=True))
    proxy.entries()
    step(SETTLING_STEPS)
    counts = median((counted_steps() for _ in range(REPEATS)), steps.tokens * steps.count)
    while not (rest := proxy.client.some()).endswith(b"0\r\n\r\n"):
        if not rest:
            upstream.post("/step", {})
    return counts


Figures = dict[tuple[str, str], Counts]
"""Entries by what was done and by API."""


def measure(tokenizer: Path | None) -> Figures:
    words, figures = Words(0), Figures()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        tokens = word_tokens(model_of(tokenizer))
        engine = stack.enter_context(upstream_server(folder, tokens))
        proxy = stack.enter_context(counted_proxy(folder, tokenizer, engine.url))
        upstream = Client(engine)
        stack.callback(upstream.close)
        for api in (CHAT, RESPONSES, MESSAGES):
            figures[UNARY, api] = first_turn(proxy, api, words)
            upstream.post("/pace", Pace(part_tokens=REPLY_TOKENS).to_json())
            figures[STREAM, api] = first_turn(proxy, api, words, stream=True)
            for name, steps in STREAMED.items():
                figures[name, api] = streamed(proxy, upstream, api, words, steps)
        figures[LATER, CHAT] = later_turns(proxy, words)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scripted = stack.enter_context(counted_proxy(folder, tokenizer, "scripted"))
        figures[SCRIPTED, CHAT] = first_turn(scripted, CHAT, words)
    return figures


def package(function: str) -> str:
    """Return the library that a function belongs to: its top-level package, or `python` for the standard library."""
    top = function.partition(".")[0]
    return "python" if top in sys.stdlib_module_names or top.startswith("namedtuple_") else top


def report(figures: Figures, console: Console) -> None:
    """Print each figure, and whose functions they are."""
    shares = {key: _by(package, counts) for key, counts in figures.items()}
    packages = Counter[str]()
    for share in shares.values():
        packages.update(share)
    columns = [name for name, _ in packages.most_common(8)]
    table = Table(title="Entries of Python functions", title_justify="left")
    table.add_column("per")
    table.add_column("API")
    for column in ("all", "limit", *columns, "others"):
        table.add_column(column, justify="right")
    for key in sorted(figures, key=lambda key: (_ORDER.index(key[0]), key[1] != CHAT)):
        share = shares[key]
        total = sum(share.values())
        parts = [share.get(column, 0) for column in columns]
        shown = [_shown(value) for value in (total, *parts, total - sum(parts))]
        table.add_row(*key, shown[0], _shown(LIMITS.get(key, 0)), *shown[1:])
    console.print(table)


_ORDER = (UNARY, LATER, SCRIPTED, STREAM, SINGLE, PIECES, TOGETHER)


def _shown(value: float) -> str:
    return "" if not value else f"{value:.0f}" if value >= 100 else f"{value:.2f}".rstrip("0").rstrip(".")


def _by(group: Callable[[str], str], counts: Counts) -> Counter[str]:
    grouped: Counter[Any] = Counter()
    for name, count in counts.items():
        grouped[group(name)] += count  # type: ignore[assignment]
    return grouped


def report_functions(figures: Figures, console: Console) -> None:
    """Print the functions that are entered most, for each figure of the chat API."""
    for key in figures:
        if key[1] != CHAT:
            continue
        table = Table("entries", "function", title=f"{key[0]}, {key[1]}", title_justify="left")
        for name, count in sorted(figures[key].items(), key=lambda item: -item[1])[:SHOWN_FUNCTIONS]:
            table.add_row(_shown(count), name)
        console.print(table)


def to_json(figures: Figures) -> bytes:
    """Return the figures that have a limit, in an order that makes small differences of files."""
    kept = {" | ".join(key): {name: round(count, 3) for name, count in sorted(figures[key].items())} for key in LIMITS}
    return orjson.dumps(kept, option=orjson.OPT_INDENT_2) + b"\n"


@dataclass(frozen=True, slots=True)
class Excess:
    """A figure above its limit, and the functions whose entries grew most since the baseline."""

    what: str
    total: float
    limit: float
    grew: tuple[tuple[str, float], ...]

    def __str__(self) -> str:
        head = f"{self.what}: {_shown(self.total)} entries of Python functions, the limit is {_shown(self.limit)}"
        return "\n".join([head, *(f"  {growth:+.2f}  {name}" for name, growth in self.grew)])


def excesses(figures: Figures, baseline: Mapping[str, Counts], limits: Mapping[tuple[str, str], float]) -> list[Excess]:
    """Return what exceeds its limit."""
    found = []
    for key, limit in limits.items():
        counts, before = figures[key], baseline.get(" | ".join(key), {})
        total = sum(counts.values())
        if total > limit:
            growth = {name: count - before.get(name, 0) for name, count in counts.items()}
            most = sorted(growth.items(), key=lambda item: (-item[1], item[0]))[:GREW_MOST]
            grew = tuple((name, entries) for name, entries in most if entries > 0)
            found.append(Excess(", ".join(key), total, limit, grew))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true", help="also print the functions that are entered most")
    parser.add_argument("--check", action="store_true", help="end with 1 if a limit is exceeded")
    parser.add_argument("--write", action="store_true", help=f"write the figures to {BASELINE.name}")
    parser.add_argument("--tokenizer", type=Path, default=assets_tokenizer(), help="folder of the tokenizer")
    options = parser.parse_args()
    console = Console(width=max(150, Console().width))
    console.print(f"Python {platform.python_version()}, tokenizer {options.tokenizer or 'built in'}", highlight=False)
    figures = measure(options.tokenizer)
    report(figures, console)
    if options.functions:
        report_functions(figures, console)
    if options.write:
        BASELINE.write_bytes(to_json(figures))
    if options.check:
        found = excesses(figures, orjson.loads(BASELINE.read_bytes()) if BASELINE.exists() else {}, LIMITS)
        for excess in found:
            console.print(str(excess), highlight=False)
        sys.exit(bool(found))


if __name__ == "__main__":
    main()
