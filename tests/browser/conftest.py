"""Chromium, servers with data of every kind, and pages that fail their test if the browser complains of anything.

Playwright is not among the packages of the test extra: `pip install -r tests/browser/requirements.txt`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser import servers, tools

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.browser.watched import Watched

_HERE = Path(__file__).parent
_WITHOUT_PLAYWRIGHT = ("test_tools.py", "test_javascript.py")
MANY = 10_000
SCREEN = {"width": 1366, "height": 768}
WAIT_MS = int(os.environ.get("TOKENGROVE_TEST_WAIT_MS", 15_000))
"""How long an expectation waits for the page; a machine may be busy, and no test passes because of it."""

if importlib.util.find_spec("playwright") is None:
    collect_ignore = [path.name for path in _HERE.glob("test_*.py") if path.name not in _WITHOUT_PLAYWRIGHT]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all tests of this folder, so that none runs where nobody asked for a browser."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium, without a window."""
    from playwright.sync_api import expect, sync_playwright

    path = tools.chromium()
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def kinds_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A database with a session of every kind."""
    return servers.kinds_database(tmp_path_factory.mktemp("kinds"))


@pytest.fixture(scope="session")
def url(kinds_database: str) -> Iterator[str]:
    """The URL of an open server with a session of every kind. Tests only read there, or in sessions of their own."""
    with servers.serving(kinds_database) as address:
        yield address


@pytest.fixture(scope="session")
def many_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with `MANY` sessions."""
    with servers.serving(servers.many_database(tmp_path_factory.mktemp("many"), MANY)) as address:
        yield address


@pytest.fixture(scope="session")
def axe(request: pytest.FixtureRequest) -> str:
    """The source of axe-core."""
    cache = request.config.cache
    assert cache is not None
    return tools.axe(cache.mkdir("axe-core"))


class Opened:
    """Opens pages. `watched`: of the page that was opened last."""

    watched: Watched

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._all: list[Watched] = []

    def __call__(self, address: str, **options: Any) -> Page:
        """Open an address such as `http://127.0.0.1:1/#/sessions` in a context of its own.

        `options`: of the context, such as `color_scheme`.
        """
        from tests.browser.watched import Watched

        context = self._browser.new_context(**{"viewport": SCREEN, **options})
        context.set_default_timeout(WAIT_MS)
        self.watched = Watched(context, "/".join(address.split("/")[:3]))
        self._all.append(self.watched)
        page = context.new_page()
        page.goto(address)
        return page

    def problems(self) -> list[str]:
        """What happened on the pages that was not allowed."""
        return [problem for watched in self._all for problem in watched.problems]

    def close(self) -> None:
        for context in self._browser.contexts:
            context.close()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Opened]:
    """Opens pages, and fails the test if the browser complained of anything on them."""
    pages = Opened(browser)
    yield pages
    problems = pages.problems()
    pages.close()
    assert problems == []
