"""The views of the page: the address of each, and an element that is there once its data are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

from playwright.sync_api import expect

from tests.browser import episodes
from tests.browser.image_episodes import BROWSING

if TYPE_CHECKING:
    from playwright.sync_api import Page

    from tests.browser.conftest import Opened

ROWS = "main [data-row]"
TURNS = "main [role=treeitem]"
TOKENS = "main [data-token]"


class View(NamedTuple):
    """`address`: below the server's URL. `drawn`: a selector of what is there once the view is drawn."""

    address: str
    drawn: str = "main h1"


def session(name: str, query: str = "") -> str:
    """The address of a session's view, below the server's URL."""
    return f"/#/session/{quote(name)}{query}"


VIEWS = {
    "sessions": View("/#/sessions", ROWS),
    "filtered": View("/#/sessions?group=sum-2&status=ended", ROWS),
    "groups": View("/#/groups", "main a[href*='sum-2']"),
    "group": View("/#/groups/sum-2", "main a[href*='sum-2-0']"),
    "overview": View("/#/overview", "main canvas"),
    "runs": View("/#/runs?run=project", "main canvas"),
    "training": View("/#/training", "main canvas"),
    "step": View("/#/training/grpo/2", "main tbody tr"),
    "told tokens": View(
        session(episodes.TOLD, "?turn=0&show=tokens&colour=stream&stream=grpo+1+is_masked"), "main .stream"
    ),
    "session": View(session(episodes.FORKED), TURNS),
    "turn": View(session(episodes.FORKED, "?turn=1"), "main .turn h2"),
    "conversation": View(session(episodes.FORKED, "?show=conversation"), "main .episode .turn-message"),
    "compared": View("/#/compare?a=sum-1-0&b=sum-1-1", "main .compare-row"),
    "to compare": View("/#/compare?a=sum-1-0", "main .compare-others"),
    "fork": View(session(episodes.FORKED, "?turn=6"), "main .turn h2"),
    "tokens": View(session(episodes.FORKED, "?turn=2&show=tokens"), TOKENS),
    "samples": View(session(episodes.FORKED, "?show=samples"), "main .samples-sum"),
    "images": View(session(BROWSING, "?turn=0"), "main .turn img.picture"),
    "images differ": View(session(BROWSING, "?turn=3"), "main .turn-fork img.picture"),
    "image tokens": View(session(BROWSING, "?turn=1&show=tokens&at=0"), "main .token-image img"),
    "failures": View(session("failures/all"), TURNS),
}
"""Every view of the page by its name."""


def show(opened: Opened, url: str, view: View, **options: object) -> Page:
    """Open a view in a context of its own and wait until it is drawn."""
    page = opened(url + view.address, **options)
    wait(page, view.drawn)
    return page


def wait(page: Page, drawn: str = "main h1") -> None:
    """Wait until a view has been drawn: `drawn` is there, one heading, and nothing that says that it still waits."""
    expect(page.locator(drawn).first).to_be_visible()
    expect(page.locator("main h1")).to_have_count(1)
    expect(page.locator("main .waiting, main [aria-busy=true]")).to_have_count(0)
