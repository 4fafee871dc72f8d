"""Makes the pictures of the documents anew, in both themes: `python -m tests.browser.screenshots [FOLDER]`.

They are taken on a database of every kind without hostile texts, on a laptop's screen, in 256 colours: the files are a
third as large then.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import itertools
import logging
import math
import os
import random
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import httpx
from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from tests.browser import data, episodes, servers, tools
from tests.browser.views import TOKENS, VIEWS, View, session, wait

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = {
    "sessions": VIEWS["sessions"],
    "session": View(session(episodes.FORKED, "?turn=6"), "main .turn h2"),
    "tokens": View(session("versions/three", "?turn=3&show=tokens&colour=logprob"), TOKENS),
    "overview": VIEWS["overview"],
}
"""The name of each picture, with the view that it shows."""
COLOURS = 256
AGENTS_S = 75.0
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
SCREEN = {"width": 1366, "height": 768}


async def agents(url: str, seconds: float) -> None:
    """Let agents talk, call tools, go back and fail for some time, so that the overview has something to show."""
    drawn, ends = random.Random(3), time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        await asyncio.gather(*(_agent(http, number, drawn, ends) for number in range(6)))


async def _agent(http: httpx.AsyncClient, number: int, drawn: random.Random, ends: float) -> None:
    history: list[dict[str, str]] = []
    for turn in itertools.count():
        if time.monotonic() > ends:
            return
        history.append(
            {"role": "user", "content": f"Say exactly: step {turn} of {number}, {'and on ' * drawn.randrange(30)}"}
        )
        body = {"model": "m", "messages": history if drawn.random() > 0.04 else []}
        answer = await http.post(f"/picture-{number}-{turn // 9}/v1/chat/completions", json=body)
        if answer.is_success:
            history.append({"role": "assistant", "content": answer.json()["choices"][0]["message"]["content"]})
        if turn % 9 == 8:
            history.clear()
        elif drawn.random() < 0.1:
            del history[-2:]
        await asyncio.sleep(drawn.random() * (0.3 + 0.3 * math.sin(time.monotonic() / 9) ** 2))


def take(page: Page, url: str, view: View, path: Path) -> None:
    """Take a picture of a view once it is drawn."""
    page.goto(url + view.address)
    wait(page, view.drawn)
    page.evaluate("document.fonts.ready")
    taken = Image.open(io.BytesIO(page.screenshot(animations="disabled", caret="hide"))).convert("RGB")
    taken.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Take all pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER)
    folder: Path = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    logging.disable(logging.CRITICAL)  # of turns that fail on purpose
    with tempfile.TemporaryDirectory() as scratch:
        database = f"sqlite:///{scratch}/pictures.db"
        data.prepare(database)
        asyncio.run(data.fill_kinds(database, hostile=False))
        with servers.serving(database) as url, sync_playwright() as playwright, ThreadPoolExecutor(1) as threads:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=tools.chromium(), args=arguments)
            every(browser, url, [name for name in PICTURES if name != "overview"], folder)
            talking = threads.submit(lambda: asyncio.run(agents(url, AGENTS_S)))  # this thread has Playwright's loop
            time.sleep(AGENTS_S - 10)
            every(browser, url, ["overview"], folder)
            talking.result()
            browser.close()


def every(browser: Browser, url: str, names: Sequence[str], folder: Path) -> None:
    """Take these pictures in both themes."""
    for scheme in SCHEMES:
        page = browser.new_page(viewport=SCREEN, color_scheme=scheme)
        for name in names:
            take(page, url, PICTURES[name], folder / f"{name}-{scheme}.png")
        page.close()


if __name__ == "__main__":
    main()
