"""Makes the pictures of the documents anew, in both themes: `python -m tests.browser.screenshots [FOLDER]`.

They are taken on a database of every kind without hostile texts, on a laptop's screen, in 256 colours: the files are a third as large then.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.browser import data, episodes, servers, tools
from tests.browser.views import TOKENS, VIEWS, View, session, wait

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
PICTURES = {
    "sessions": VIEWS["sessions"],
    "group": VIEWS["group"],
    "session": View(session(episodes.FORKED, "?turn=6"), "main .turn h2"),
    "tokens": View(session("versions/three", "?turn=3&show=tokens&colour=logprob"), TOKENS),
    "samples": VIEWS["samples"],
    "overview": VIEWS["overview"],
}
"""The name of each picture, with the view that it shows."""
COLOURS = 256
SCREEN = {"width": 1366, "height": 768}


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
        with servers.serving(database) as url, sync_playwright() as playwright:
            arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
            browser = playwright.chromium.launch(executable_path=tools.chromium(), args=arguments)
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport=SCREEN, color_scheme=scheme)
                for name, view in PICTURES.items():
                    take(page, url, view, folder / f"{name}-{scheme}.png")
                page.close()
            browser.close()


if __name__ == "__main__":
    main()
