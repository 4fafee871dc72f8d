"""Lists: filters and scrolling find what is there, also among 10,000 sessions, of which few are drawn at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from playwright.sync_api import Page, expect

from tests.browser.conftest import MANY
from tests.browser.views import ROWS, VIEWS, show, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

NAMES = f"{ROWS} td:first-child a"
DRAWN_AT_MOST = 150
"""Rows of a list in the document at once, whatever its length; a screen has some twenty."""
# Scrolls to the end, as fast as the page draws: [the ids by row, the most rows that were in the document at once].
_ALL = """
async ([rows, count]) => {
  const seen = {};
  let most = 0;
  for (let still = 0; Object.keys(seen).length < count && still < 3000; still += 1) {
    const drawn = [...document.querySelectorAll(rows)];
    most = Math.max(most, drawn.length);
    for (const row of drawn) {
      if (!(row.dataset.row in seen)) still = 0;
      seen[row.dataset.row] = row.querySelector("a").textContent;
    }
    drawn.at(-1).scrollIntoView({ block: "start" });
    await new Promise(requestAnimationFrame);
  }
  return [seen, most];
}
"""


def expect_names(page: Page, *wanted: str) -> None:
    """Wait until the list shows these sessions, in this order."""
    expect(page.locator(NAMES)).to_have_text(wanted)


def test_the_list_has_the_newest_session_first(url: str, opened: Opened) -> None:
    page = show(opened, url, VIEWS["filtered"])
    expect_names(page, *(f"sum-2-{number}" for number in reversed(range(8))))
    page.get_by_label("Order").select_option("oldest")
    expect_names(page, *(f"sum-2-{number}" for number in range(8)))
    assert "order=oldest" in page.url


def test_of_ten_thousand_sessions_few_are_drawn_and_all_are_reached(many_url: str, opened: Opened) -> None:
    page = show(opened, many_url, VIEWS["sessions"])
    seen, most = page.evaluate(_ALL, [ROWS, MANY])
    assert [seen[str(row)] for row in range(len(seen))] == [f"many-{MANY - 1 - row:05}" for row in range(MANY)]
    assert most <= DRAWN_AT_MOST


def test_a_search_among_ten_thousand_sessions_finds_one(many_url: str, opened: Opened) -> None:
    page = show(opened, many_url, VIEWS["sessions"])
    page.get_by_label("Search").fill("many-01234")
    expect(page.locator(ROWS)).to_have_count(1)
    page.get_by_role("link", name="many-01234").click()
    wait(page, "main [role=treeitem]")
    expect(page.locator("main h1")).to_contain_text("many-01234")
