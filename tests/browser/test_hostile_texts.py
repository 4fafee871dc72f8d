"""Texts of agents are shown as texts on every view: no markup, no script, no request, no link that leads away.

Each page is watched (`watched.py`): a test fails for a dialog, a script that ran, an element that only a text can have
brought, a request to another origin, and a violation of the content security policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from tests.browser import episodes, hostile
from tests.browser.image_episodes import HOSTILE_IMAGES
from tests.browser.views import ROWS, TOKENS, TURNS, View, session, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

VIEWS = {
    "sessions": View("/#/sessions", ROWS),
    "search": View(f"/#/sessions?search={hostile.SESSION_IDS[0]}", ROWS),
    "filter": View(f"/#/sessions?group={quote(hostile.CLOSING)}", ROWS),
    "no match": View(f"/#/sessions?task={quote(hostile.FRAME)}"),
    "groups": View("/#/groups"),
    "group": View(f"/#/groups/{quote(hostile.CLOSING, safe='')}"),
    "overview": View("/#/overview", "main canvas"),
    "session": View(session(episodes.HOSTILE), TURNS),
    "long lines": View(session(episodes.LONG_LINES, "?turn=0"), TURNS),
    "no view": View("/#/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E/x"),
    "no session": View(session("javascript:alert(1)")),
    **{f"turn {turn}": View(session(episodes.HOSTILE, f"?turn={turn}"), "main .turn h2") for turn in range(4)},
    **{f"tokens {turn}": View(session(episodes.HOSTILE, f"?turn={turn}&show=tokens"), TOKENS) for turn in (0, 3)},
    "conversation": View(session(episodes.HOSTILE, "?show=conversation&turn=1"), "main .episode .turn-message"),
    "long conversation": View(session(episodes.LONG_LINES, "?show=conversation"), "main .episode .turn-message"),
    "to compare": View(f"/#/compare?a={quote(hostile.SESSION_IDS[0], safe='')}", "main .compare-choice"),
    **{
        f"compared {name[:20]}": View(
            f"/#/compare?a={quote(episodes.HOSTILE)}&b={quote(name, safe='')}", "main .compare-row"
        )
        for name in hostile.SESSION_IDS
    },
    "images": View(session(HOSTILE_IMAGES, "?turn=0"), "main img.picture"),
    "image tokens": View(session(HOSTILE_IMAGES, "?turn=1&show=tokens&at=0"), "main .token-image img"),
    "samples": View(session(episodes.HOSTILE, "?show=samples"), "main .samples-sum"),
    **{f"id {name[:20]}": View(session(name), TURNS) for name in hostile.SESSION_IDS},
}


@pytest.mark.parametrize("view", VIEWS)
def test_texts_of_agents_are_no_markup(url: str, opened: Opened, view: str) -> None:
    page = opened(url + VIEWS[view].address)
    opened.watched.allow("status of 40[04]")  # what no session or filter can be called
    wait(page, VIEWS[view].drawn)
    expand(page)
    assert opened.watched.problems == []


def expand(page: Page) -> None:
    """Open what can be opened, so that the texts within are there."""
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")


def test_the_texts_are_there_to_be_read(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.HOSTILE, "?turn=0"))
    wait(page, "main .turn h2")
    expand(page)
    expect(page.locator("main")).to_contain_text(hostile.SCRIPT)
    expect(page.locator("main")).to_contain_text(hostile.IMAGE)


def test_the_watch_sees_markup_that_a_text_would_make(url: str, opened: Opened) -> None:
    page = opened(url)
    wait(page)
    page.evaluate("document.body.append(document.createElement('img'))")
    page.evaluate("document.body.append(Object.assign(document.createElement('a'), {href: 'javascript:1'}))")
    page.evaluate(f"window.{hostile.MARKER} = 1")
    page.evaluate("setTimeout(() => { throw new Error('thrown'); })")
    page.evaluate("fetch('http://127.0.0.1:9/').catch(() => 0)")
    found = "\n".join(opened.watched.problems)
    for word in (
        "elements that only texts",
        "picture: ",
        "link: javascript:1",
        "script in a text",
        "thrown",
        "connect-src",
    ):
        assert word in found
        opened.watched.allow(word)
    opened.watched.allow("Fetch API cannot load|Connecting to|another origin")
