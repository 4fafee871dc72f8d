"""The built documentation site in Chromium, on a wide and on a narrow screen.

`TOKENGROVE_TEST_SITE` is the folder that `python -m supply.site` wrote; without it, these tests are skipped.
"""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

SITE = Path(os.environ.get("TOKENGROVE_TEST_SITE", "nowhere"))
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="TOKENGROVE_TEST_SITE names no folder with the built site")
PAGES = ("", "docs/page/", "docs/http-api/", "docs/trajectories/", "api/tokengrove/", "examples/grpo_step.py/")


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files without a log."""

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture(scope="module")
def site_url() -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_the_screen_ask_no_other_host_and_the_search_finds_a_method(
    browser: Browser, site_url: str, width: int
) -> None:
    from playwright.sync_api import expect

    context = browser.new_context(viewport={"width": width, "height": 800})
    problems: list[str] = []
    context.on("weberror", lambda error: problems.append(str(error.error)))
    context.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    context.on("request", lambda request: problems.append(request.url) if foreign(request.url, site_url) else None)
    page = context.new_page()
    for path in PAGES:
        page.goto(f"{site_url}/{path}")
        expect(page.locator("h1").first).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
    page.goto(site_url)
    page.keyboard.press("/")
    page.get_by_role("combobox").fill("set_reward")
    found = page.get_by_role("option", name="set_reward").and_(page.locator("[href*='tokengrove.Session.set_reward']"))
    expect(found).to_be_visible()
    context.close()
    assert problems == []


def foreign(url: str, origin: str) -> bool:
    return not url.startswith((f"{origin}/", "data:", "blob:"))
