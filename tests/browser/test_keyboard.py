"""Without a mouse, and on small or enlarged screens: everything is reached, nothing is cut off."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from tests.browser import episodes
from tests.browser.views import ROWS, TOKENS, TURNS, VIEWS, View, session, show, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

_FOCUS = """
() => {
  const { tagName, textContent, ariaLabel } = document.activeElement;
  const { outlineStyle, outlineWidth, boxShadow } = getComputedStyle(document.activeElement);
  const seen = (outlineStyle !== "none" && outlineWidth !== "0px") || boxShadow !== "none";
  return { tagName, text: (ariaLabel ?? textContent).trim().slice(0, 80), seen };
}
"""
MOST_TABS = 120
SMALL = {"width": 683, "height": 384}
"""A laptop's screen at a zoom of 200%."""
NARROW = {"width": 390, "height": 844}


def tab_to(page: Page, selector: str) -> None:
    """Press Tab until the focus is on (or within) an element; each stop on the way must be seen."""
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        focus = page.evaluate(_FOCUS)
        assert focus["tagName"] == "BODY" or focus["seen"], f"the focus cannot be seen on {focus}"
        if page.evaluate("(selector) => document.activeElement.closest(selector) !== null", selector):
            return
    raise AssertionError(f"{MOST_TABS} times Tab do not lead to {selector}; the last stop is {focus}")


def test_the_keyboard_leads_from_the_list_to_a_token_and_back(url: str, opened: Opened) -> None:
    page = show(opened, url, VIEWS["filtered"])
    tab_to(page, f"{ROWS} a")
    page.keyboard.press("ArrowDown")
    expect(page.locator(f"{ROWS} a:focus")).to_have_text("sum-2-6")
    page.keyboard.press("Enter")
    wait(page, TURNS)
    expect(page.locator("main h1")).to_be_focused()
    tab_to(page, "[role=tree]")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    tab_to(page, "a[href*='show=tokens']")
    page.keyboard.press("Enter")
    wait(page, TOKENS)
    tab_to(page, "[data-token]")
    before = page.evaluate("Number(document.activeElement.dataset.token)")
    page.keyboard.press("ArrowLeft")
    expect(page.locator(f"[data-token='{before - 1}']")).to_be_focused()
    while "#/sessions" not in page.url:
        page.go_back()
    wait(page, ROWS)
    expect(page.get_by_label("Group")).to_have_value("sum-2")


@pytest.mark.parametrize("name", ["filtered", "overview", "tokens"])
def test_tab_goes_round_without_a_trap(url: str, opened: Opened, name: str) -> None:
    page = show(opened, url, VIEWS[name])
    stops = []
    for _ in range(MOST_TABS):
        page.keyboard.press("Tab")
        stops.append(page.evaluate(_FOCUS))
        if len(stops) > 1 and stops[-1] == stops[0]:
            break
    assert stops[-1] == stops[0], f"the focus does not come back to {stops[0]}; it is on {stops[-1]}"
    assert [stop for stop in stops if stop["tagName"] != "BODY" and not stop["seen"]] == []


_SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
# Parts of the frame and of views that reach beyond the screen, unless something around them scrolls.
_COVERED = """
() => [...document.querySelectorAll("header a, header button, header label, main h1, main button")].flatMap((each) => {
  const { left, right, width } = each.getBoundingClientRect();
  const beyond = width > 1 && (left < -1 || right > innerWidth + 1);
  const within = each.closest(".virtual, [role=grid], [role=tree]");
  return beyond && !within ? [`${each.textContent} ${left} to ${right}`] : [];
})
"""


@pytest.mark.parametrize("screen", [SMALL, NARROW], ids=["zoomed", "narrow"])
@pytest.mark.parametrize(
    "name", ["sessions", "group", "overview", "fork", "conversation", "compared", "tokens", "samples"]
)
def test_a_small_screen_has_everything_without_scrolling_sideways(
    url: str, opened: Opened, name: str, screen: dict[str, int]
) -> None:
    page = show(opened, url, VIEWS[name], viewport=screen)
    assert (page.evaluate(_SIDEWAYS), page.evaluate(_COVERED)) == (0, [])


def test_a_token_that_is_hovered_or_focused_says_its_id_logprob_and_version(url: str, opened: Opened) -> None:
    page = show(opened, url, View(session(episodes.FORKED, "?turn=2&show=tokens"), TOKENS))
    cell = page.locator(f"{TOKENS}.sampled").first
    cell.hover()
    panel = page.locator("main .tokens")
    for word in ("Id", "Logprob", "Version"):
        expect(panel).to_contain_text(word, ignore_case=True)
