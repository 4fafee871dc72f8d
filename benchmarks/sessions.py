"""Sessions of the load: shapes from `shapes.json`, with texts from a seed.

A shape has the roles and lengths of the messages that each turn adds, the turn that it continues, and whether its
answer calls a tool. `Play` makes the messages of a turn from the answers so far.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.model import IMAGE_SIDE
from benchmarks.sampling import SHORTEST, SHORTEST_CALL
from benchmarks.texts import Words

FILE = Path(__file__).with_name("shapes.json")
TOKENS_PER_WORD = 1.6
"""Of the load's words, with the trained tokenizer."""

KINDS = ("recorded", "compaction", "forks")
TOOLS = ("search", "read", "write", "run", "list", "fetch")

Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """`parent`: the turn that it continues; None: a new conversation. `new`: role and tokens of each new message."""

    parent: int | None
    new: Sequence[tuple[str, int]]
    output: int
    calls: bool
    image: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """`kind`: recorded, compaction, forks or images. `stream`: the agent streams its answers."""

    name: str
    kind: str
    stream: bool
    tools: int
    turns: Sequence[Turn]

    def first(self, turns: int) -> Shape:
        return replace(self, turns=self.turns[:turns])


@cache
def shapes() -> tuple[Shape, ...]:
    """Return all shapes."""
    return tuple(_shape(entry) for entry in json.loads(FILE.read_text(encoding="utf-8"))["shapes"])


def _shape(entry: Mapping[str, Any]) -> Shape:
    turns = tuple(_turn(turn) for turn in entry["turns"])
    return Shape(entry["name"], entry["kind"], entry["stream"], entry["tools"], turns)


def _turn(entry: Mapping[str, Any]) -> Turn:
    new = tuple((role, tokens) for role, tokens in entry["new"])
    shortest = SHORTEST_CALL if entry["calls"] else SHORTEST
    output = max(entry["output"], shortest)
    return Turn(entry["parent"], new, output, entry["calls"], entry.get("image", False))


@dataclass(frozen=True, slots=True)
class Session:
    """A session to play. `group`: sessions of a group have equal tools and system prompts."""

    number: int
    shape: Shape
    group: int


def workload(per_shape: int, *, first: int = 0, kinds: Sequence[str] = KINDS) -> list[Session]:
    """Return `per_shape` sessions of each shape, shapes alternating. `first`: the number of the first session."""
    chosen = [shape for shape in shapes() if shape.kind in kinds]
    numbered = enumerate(shape for _ in range(per_shape) for shape in chosen)
    return [Session(first + place, shape, place % len(chosen)) for place, shape in numbered]


class Play:
    """The agent of a session: it makes the body of each turn, and keeps the answers."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._histories: list[list[Message]] = []
        self._tools = list(_tools(session.shape, session.group))

    def body(self, index: int, stream: bool) -> dict[str, Any]:
        """Return the body of turn `index`. The turn that it continues must have been answered."""
        turn = self.session.shape.turns[index]
        history = [] if turn.parent is None else self._histories[turn.parent]
        body: dict[str, Any] = {
            "model": "bench",
            "messages": [*history, *self._new(index, history)],
            "max_tokens": turn.output,
            "temperature": 1.0,
        }
        if self._tools:
            body["tools"] = self._tools
        if stream:
            body["stream"] = True
        return body

    def take(self, body: Mapping[str, Any], answer: Message) -> None:
        """Keep the answer to the next turn as stock SDKs echo it."""
        echoed = {name: answer[name] for name in ("role", "content", "tool_calls") if answer.get(name)}
        self._histories.append([*body["messages"], {"role": "assistant", "content": "", **echoed}])

    def _new(self, index: int, history: Sequence[Message]) -> Iterator[Message]:
        turn, seed = self.session.shape.turns[index], f"{self.session.number}.{index}"
        calls = list(history[-1].get("tool_calls") or []) if history else []
        for place, (role, tokens) in enumerate(turn.new):
            system = role == "system" and place == 0 and not history
            words = Words(f"{self.session.group}.system" if system else f"{seed}.{place}")
            text = words.text(max(1, round(tokens / TOKENS_PER_WORD)))
            last = place == len(turn.new) - 1
            if last:
                text += f"\n[turn {seed} {'call ' + TOOLS[index % self._callable] if self._called(turn) else 'say'}]"
            image = turn.image and last
            if calls:
                result = "A screenshot follows." if image else text
                yield {"role": "tool", "tool_call_id": calls.pop(0)["id"], "content": result}
                if not image:
                    continue
            content: Any = _with_image(text, seed) if image else text
            yield {"role": "system" if system else "user", "content": content}

    @property
    def _callable(self) -> int:
        return min(len(self._tools), len(TOOLS))

    def _called(self, turn: Turn) -> bool:
        return turn.calls and bool(self._tools)


def _tools(shape: Shape, group: int) -> Iterator[dict[str, Any]]:
    for place in range(shape.tools):
        name = TOOLS[place] if place < len(TOOLS) else f"tool_{place}"
        words = Words(f"{group}.{name}")
        query = {"type": "string", "description": words.text(8)}
        parameters = {"type": "object", "properties": {"query": query}, "required": ["query"]}
        function = {"name": name, "description": words.text(24), "parameters": parameters}
        yield {"type": "function", "function": function}


def _with_image(text: str, seed: str) -> list[dict[str, Any]]:
    url = "data:image/png;base64," + base64.b64encode(_png(seed)).decode()
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]


def _png(seed: str) -> bytes:
    """Return a grey PNG whose pixels are those of the seed."""
    noise = Words(seed).text(IMAGE_SIDE * IMAGE_SIDE).encode()
    rows = [b"\0" + noise[row * IMAGE_SIDE : (row + 1) * IMAGE_SIDE] for row in range(IMAGE_SIDE)]
    head = struct.pack(">IIBBBBB", IMAGE_SIDE, IMAGE_SIDE, 8, 0, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
    written = [_chunk(kind, data) for kind, data in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(written)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
