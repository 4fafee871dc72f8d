"""Time to first token through the proxy's three APIs and from the same engine directly, in one run.

Run `python -m tests.bench.first_token`. The engine is `transformers` with the built-in model; no figure fails the
bench."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from proxy.engine.create import create_engine, model_folder
from proxy.engine.requests import GenerateRequest
from proxy.prompt_ids import PromptIds
from proxy.rendering.renderer import load_renderer
from proxy.serving.server import serving
from proxy.settings import Settings
from proxy.types import Message, Role, SamplingParams

REPEATS = 41
MAX_TOKENS = 4
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "responses": {"input": "hello"},
    "messages": {"messages": [{"role": "user", "content": "hello"}]},
}
# A pattern of the first piece of the answer in each API.
FIRST = {"chat/completions": '"content":"', "responses": "output_text.delta", "messages": "text_delta"}
LIMITS = {"chat/completions": "max_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


async def direct_ms() -> float:
    """The engine alone."""
    renderer = load_renderer(Settings(), model_folder(Settings()))
    engine = create_engine(Settings(), renderer.vocab_size)
    await engine.start()
    prompt = renderer.render((Message(Role.USER, "hello"),), (), {})
    figures = []
    try:
        for number in range(REPEATS):
            request = GenerateRequest(f"r{number}", PromptIds(prompt), SamplingParams(max_tokens=MAX_TOKENS))
            start, seen = time.perf_counter(), 0.0
            async for chunk in engine.generate(request):
                if chunk.ids and not seen:
                    seen = time.perf_counter() - start
            figures.append(seen)
    finally:
        await engine.close()
    return statistics.median(figures[1:]) * 1e3


async def proxied_ms(url: str, path: str) -> float:
    """Return the time from sending a request to the first piece of text, over one kept-alive connection."""
    body = {"model": "m", "stream": True, LIMITS[path]: MAX_TOKENS, **BODIES[path]}
    figures = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        for number in range(REPEATS):
            start = time.perf_counter()
            seen = 0.0
            async with http.stream("POST", f"/s{number}/v1/{path}", json=body) as response:
                async for line in response.aiter_lines():
                    if not seen and FIRST[path] in line and '"content":""' not in line:
                        seen = time.perf_counter() - start
            if seen:  # a first token that is part of a character gives no text yet
                figures.append(seen)
    return statistics.median(figures[1:]) * 1e3


def main() -> None:
    table = Table("asked", "first token ms", "beyond the engine ms")
    direct = asyncio.run(direct_ms())
    table.add_row("the engine", f"{direct:.2f}", "")
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(port=0, database_url=f"sqlite:///{Path(folder) / 'bench.db'}", log_level="warning")
        with serving(settings) as url:
            for path in BODIES:
                figure = asyncio.run(proxied_ms(url, path))
                table.add_row(path, f"{figure:.2f}", f"{figure - direct:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
