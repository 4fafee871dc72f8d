"""The addresses of all views of the page, with a part of each that is there once it has been drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from playwright.sync_api import expect

from tests.browser import episodes

if TYPE_CHECKING:
    from playwright.sync_api import Page


def session(name: str, query: str = "") -> str:
    """The address of a session's view, below the server's URL."""
    return f"/#/session/{quote(name)}{query}"


VIEWS = {
    "sessions": "/#/sessions",
    "groups": "/#/groups",
    "group": "/#/groups/sum-2",
    "overview": "/#/overview",
    "session": session(episodes.FORKED),
    "turn": session(episodes.FORKED, "?turn=1"),
    "fork": session(episodes.FORKED, "?turn=6"),
    "tokens": session(episodes.FORKED, "?turn=2&show=tokens"),
    "samples": session(episodes.FORKED, "?show=samples"),
    "failures": session("failures/all"),
}
"""Every view of the page by its name."""


def wait(page: Page) -> None:
    """Wait until the view has been drawn: it has its heading, and nothing that says that it still waits."""
    expect(page.locator("main h1")).to_have_count(1)
    expect(page.locator("main .waiting, main [aria-busy=true]")).to_have_count(0)
