"""A session with many screenshots: CPU time of a turn beside a bare handler of the same JSON, memory, and the database.

Each turn brings a new PNG of 1280 x 800 pixels, about as large as a screenshot of a page with text. Whole histories are
sent again, or only what is new (`previous_response_id`). The model is tiny; the engine is scripted, so all time is the
proxy's. The bare handler parses the same bodies in the same run.

Run `python -m tests.bench.images [--turns 200]` from the root of the repository. No figure fails the bench."""

from __future__ import annotations

import argparse
import io
import random
import statistics
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from proxy.engine.tiny.vision import build_tiny_vision_model
from tests.bench.load import connect
from tests.bench.overhead import machine
from tests.bench.servers import Server, bare_server, on_core, proxy_server
from tests.bench.sizing import memory_mb

SCREEN = (1280, 800)
NEAR = 3
BODY_BYTES = str(256 * 2**20)
FLAGS = ("--max-body-bytes", BODY_BYTES, "--max-inflight-body-bytes", str(8 * 256 * 2**20))
MODES = ("chat", "messages", "responses", "responses, previous_response_id")


@cache
def screenshot(number: int) -> str:
    """A PNG in base64: a page of small text, with a photograph-like area, of some 340 kB."""
    from PIL import Image, ImageDraw

    chance = random.Random(number)
    image = Image.new("RGB", SCREEN, (250, 250, 252))
    draw = ImageDraw.Draw(image)
    for line in range(60):
        words = " ".join(f"{chance.getrandbits(40):x}" for _ in range(12))
        draw.text((20, 12 * line + 40), words, fill=(40, 44, 52))
    image.paste(Image.frombytes("RGB", (240, 180), chance.randbytes(240 * 180 * 3)), (1000, 60))
    file = io.BytesIO()
    image.save(file, "PNG")
    return b64encode(file.getvalue()).decode()


class Agent:
    """One API's session: its next body, and what it takes from an answer. Bodies are joined of parts encoded once."""

    def __init__(self, mode: str, number: int) -> None:
        self.mode, self.api = mode, mode.partition(",")[0]
        self.path = f"/images-{number}/v1/" + {"chat": "chat/completions"}.get(self.api, self.api)
        self._parts: list[bytes] = []
        self._previous: str | None = None

    def body(self, turn: int) -> bytes:
        new = orjson.dumps({"role": "user", "content": self._content(turn)})
        if "previous" in self.mode:
            self._parts = []
        self._parts.append(new)
        head: dict[str, Any] = {"model": "m", "max_output_tokens" if self.api == "responses" else "max_tokens": 64}
        if self._previous and "previous" in self.mode:
            head["previous_response_id"] = self._previous
        name = b"input" if self.api == "responses" else b"messages"
        return orjson.dumps(head)[:-1] + b',"' + name + b'":[' + b",".join(self._parts) + b"]}"

    def _content(self, turn: int) -> list[dict[str, Any]]:
        data, text = screenshot(turn), f"Step {turn}."
        url = f"data:image/png;base64,{data}"
        if self.api == "chat":
            return [{"type": "text", "text": text}, {"type": "image_url", "image_url": {"url": url}}]
        if self.api == "responses":
            return [{"type": "input_text", "text": text}, {"type": "input_image", "image_url": url}]
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return [{"type": "text", "text": text}, {"type": "image", "source": source}]

    def take(self, answer: bytes) -> None:
        reply = orjson.loads(answer)
        if self.api == "chat":
            said: list[Any] = [reply["choices"][0]["message"]]
        elif self.api == "messages":
            said = [{"role": "assistant", "content": reply["content"]}]
        else:
            said, self._previous = reply["output"], reply["id"]
        self._parts += map(orjson.dumps, said)


@dataclass(slots=True)
class Costs:
    """Of one mode: CPU time by turn in ns, of the proxy and of the bare handler, and the size of the body."""

    proxy: list[int] = field(default_factory=list)
    bare: list[int] = field(default_factory=list)
    body: list[int] = field(default_factory=list)
    peak_mb: float = 0.0

    def near_ms(self, values: Sequence[int], turn: int) -> float:
        return statistics.median(values[max(0, turn - NEAR) : turn + NEAR]) / 1e6


async def measure(mode: str, number: int, proxy: Server, bare: Server, turns: int) -> Costs:
    agent, costs = Agent(mode, number), Costs()
    ours, other = await connect(proxy), await connect(bare)
    for turn in range(turns):
        body = agent.body(turn)
        before = proxy.cpu_ns()
        answer = await ours.post(agent.path, body)
        costs.proxy.append(proxy.cpu_ns() - before)
        before = bare.cpu_ns()
        await other.post("/bare/v1/chat/completions", body)
        costs.bare.append(bare.cpu_ns() - before)
        costs.body.append(len(body))
        agent.take(answer)
    ours.close()
    other.close()
    costs.peak_mb = memory_mb(proxy, "VmHWM")
    return costs


def run(turns: int, modes: Sequence[str]) -> tuple[dict[str, Costs], float]:
    """The costs by mode, each with a server of its own on one database, and the size of the database in MB."""
    found: dict[str, Costs] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        build_tiny_vision_model(folder / "model")
        reply = folder / "reply.json"
        reply.write_bytes(orjson.dumps({"id": "x", "choices": []}))
        for number, mode in enumerate(modes):
            with ExitStack() as stack:
                options = ("--model", str(folder / "model"), *FLAGS)
                proxy = stack.enter_context(proxy_server(folder, None, "scripted", *options))
                bare = stack.enter_context(bare_server(folder, reply))
                stack.enter_context(on_core(1))
                found[mode] = uvloop.run(measure(mode, number, proxy, bare, turns))
        size = sum(path.stat().st_size for path in folder.glob("bench.db*"))
    return found, size / 1e6


def report(found: dict[str, Costs], size_mb: float, console: Console) -> None:
    table = Table(title="One request at a time, a new screenshot in each; medians", title_justify="left")
    table.add_column("mode")
    for column in ("turn", "body MB", "CPU ms", "bare CPU ms", "ratio", "peak MB"):
        table.add_column(column, justify="right")
    for mode, costs in found.items():
        last = len(costs.proxy) - 1
        for turn in sorted({min(5, last), last // 2, last}):
            ours, bare = costs.near_ms(costs.proxy, turn), costs.near_ms(costs.bare, turn)
            peak = f"{costs.peak_mb:.0f}" if turn == last else ""
            row = (f"{costs.body[turn] / 1e6:.2f}", f"{ours:.1f}", f"{bare:.1f}", f"{ours / bare:.1f}", peak)
            table.add_row(mode, str(turn + 1), *row)
    console.print(table)
    unique = {turn for costs in found.values() for turn in range(len(costs.proxy))}
    images = sum(len(screenshot(turn)) * 3 / 4 for turn in unique) / 1e6
    console.print(f"database {size_mb:.1f} MB, of {len(unique)} different images of {images:.1f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--mode", action="append", choices=MODES, help="all of them if none is given")
    options = parser.parse_args()
    console = Console(width=max(120, Console().width))
    console.print(machine(), highlight=False)
    report(*run(options.turns, options.mode or MODES), console)


if __name__ == "__main__":
    main()
