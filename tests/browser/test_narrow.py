"""Windows of 400 and 1280 pixels: nothing that matters is hidden, and nothing overflows, also while a view loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, Route, expect

from tests.browser.test_accessibility import _RUN, found
from tests.browser.views import VIEWS, show

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

NARROW = {"width": 400, "height": 800}
LISTS = ("sessions", "filtered", "groups", "group")
# The page itself, or a card whose text is wider than it is and that neither scrolls nor ends with "…".
_OVERFLOWS = """
() => {
  const spills = (element) => getComputedStyle(element).overflowX === "visible";
  const wide = (element) => element.scrollWidth > element.clientWidth + 1 && spills(element);
  const named = (element) => `${element.className}: ${element.scrollWidth} > ${element.clientWidth}`;
  const page = document.documentElement;
  return [
    ...(page.scrollWidth > innerWidth ? [`page: ${page.scrollWidth} > ${innerWidth}`] : []),
    ...[...document.querySelectorAll("main .card, main .card > *")].filter(wide).map(named),
  ];
}
"""
# Pairs of texts in the first cards that lie on each other.
_OVERLAPS = """
() => [...document.querySelectorAll(".row-card")].slice(0, 5).flatMap((card) => {
  const cells = [...card.querySelectorAll(":scope > * > *")];
  const parts = cells.map((part) => [part.textContent, part.getBoundingClientRect()]);
  const meet = (one, other, from, to) => one[from] < other[to] - 1 && other[from] < one[to] - 1;
  const crossing = (one, other) => meet(one, other, "left", "right") && meet(one, other, "top", "bottom");
  const below = card.getBoundingClientRect().bottom;
  return parts.flatMap(([text, box], at) => [
    ...parts.slice(at + 1).filter(([, other]) => crossing(box, other)).map(([other]) => `${text} | ${other}`),
    ...(box.bottom > below + 1 ? [`${text} is below its card`] : []),
  ]);
})
"""


def narrow(opened: Opened, url: str, name: str) -> Page:
    view = VIEWS[name]
    page = opened(url + view.address, viewport=NARROW)
    expect(page.locator(".row-card").first).to_be_visible()
    return page


@pytest.mark.parametrize("name", LISTS)
def test_rows_of_lists_are_cards_in_a_narrow_window(url: str, opened: Opened, name: str) -> None:
    page = narrow(opened, url, name)
    expect(page.locator("main table")).to_have_count(0)
    card = page.locator(".row-card").first
    first = card.locator(":scope > :first-child > *").evaluate_all(
        "(cells) => cells.sort((one, other) => one.getBoundingClientRect().left - other.getBoundingClientRect().left)"
        ".map((cell) => cell.textContent)"
    )
    assert first[0].startswith("Mean" if name == "groups" else "Reward")
    if name != "groups":
        assert "ended" in first[1] or "open" in first[1]
    assert page.evaluate(_OVERLAPS) == []


@pytest.mark.parametrize("name", LISTS)
def test_axe_finds_no_violation_in_cards(url: str, opened: Opened, axe: str, name: str) -> None:
    page = narrow(opened, url, name)
    page.evaluate(axe)
    assert "\n".join(found(page.evaluate(_RUN))) == ""


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", VIEWS)
def test_no_view_overflows(url: str, opened: Opened, name: str, width: int) -> None:
    page = (
        narrow(opened, url, name)
        if width == 400 and name in LISTS
        else show(opened, url, VIEWS[name], viewport={"width": width, "height": 800})
    )
    assert page.evaluate(_OVERFLOWS) == []


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("name", ["sessions", "groups", "group", "overview", "runs", "training", "step", "session"])
def test_nothing_overflows_while_a_view_loads(url: str, opened: Opened, name: str, width: int) -> None:
    page = opened(f"{url}/#/nowhere", viewport={"width": width, "height": 800})
    waiting: list[Route] = []
    for path in ("**/rl/**", "**/trajectories/**"):
        page.route(path, lambda route: waiting.append(route))
    with page.expect_request(lambda request: "/rl/" in request.url or "/trajectories/" in request.url):
        page.goto(url + VIEWS[name].address)
    expect(page.locator("main h1")).to_have_count(1)
    assert page.evaluate(_OVERFLOWS) == []
    for route in waiting:
        route.abort()
    opened.watched.allow("ERR_FAILED")


def test_the_keys_walk_through_cards(url: str, opened: Opened) -> None:
    page = narrow(opened, url, "sessions")
    page.locator('[data-row="0"] [data-focus]').focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator('[data-row="1"] [data-focus]')).to_be_focused()
    page.keyboard.press("PageDown")
    assert int(page.evaluate("document.activeElement.closest('[data-row]').dataset.row")) > 2


def test_a_window_that_becomes_narrow_turns_rows_into_cards(url: str, opened: Opened) -> None:
    page = show(opened, url, VIEWS["sessions"])
    expect(page.locator("main table")).to_have_count(1)
    page.set_viewport_size(NARROW)
    expect(page.locator(".row-card").first).to_be_visible()
    expect(page.locator("main table")).to_have_count(0)
