"""Side columns in Chromium: the kept set of a token and its mass, experts as a strip, and what a turn recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, expect

from tests.browser import servers
from tests.browser.views import session, wait
from tests.recording import CHOSEN, LAYERS, experts_at, recording
from tests.support import default_url, user

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

LONG = "word " * 100
MOST = 256


@pytest.fixture(scope="module")
def columns_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a server with two turns that recorded everything, a long one, one with kept sets, and one without."""
    folder = tmp_path_factory.mktemp("columns")
    with ThreadPoolExecutor(1) as threads:  # Playwright runs an event loop in the thread of the tests
        threads.submit(lambda: asyncio.run(_fill(folder))).result()
    with servers.serving(default_url(folder)) as address:
        yield address


async def _fill(folder: Path) -> None:
    async with recording(folder, "the lazy dog", "and the fox", LONG) as server:
        asked = [user("Say it.")]
        await server.answer([*asked, await server.answer(asked), user("Who else?")])
        await server.answer(asked, "long", max_tokens=600)
    async with recording(folder, "only sets", replay=["kept"]) as server:
        await server.answer(asked, "dense")
    async with recording(folder, "nothing", replay=[]) as server:
        await server.answer(asked, "plain")


def columns(url: str, name: str, turn: int) -> Any:
    """The columns of all tokens of a turn."""
    query: dict[str, Any] = {"include": "columns", "start": 0, "limit": MOST}
    return httpx.get(f"{url}/rl/sessions/{name}/interactions/{turn}", params=query).json()["columns"]


def tokens(opened: Opened, url: str, name: str, turn: int, **options: Any) -> tuple[Page, Locator]:
    """The token view of a turn, and the part of it with what was recorded beside a token."""
    page = opened(f"{url}{session(name, f'?turn={turn}&show=tokens')}", **options)
    wait(page, "main [data-token]")
    return page, page.get_by_role("region", name="Recorded beside the chosen token")


def test_the_token_under_the_pointer_shows_its_kept_set_and_mass(columns_url: str, opened: Opened) -> None:
    page, shown = tokens(opened, columns_url, "s", 0)
    found = columns(columns_url, "s", 0)
    rows = [(at, row) for at, row in enumerate(found["kept"]) if row is not None]
    assert len(rows) > 3
    for at, row in rows:
        page.locator(f"[data-token='{at}']").hover()
        number = f"all but {row['number']:,}" if row["excluded"] else f"{row['number']:,}"
        mass = f"{row['mass']:.2g}"
        said = f"kept {number} of {found['vocab_size']:,} (mass {mass})"
        expect(shown.locator(".tokens-kept dd")).to_have_text(said)
        if row["ids"]:
            expect(shown.locator(".tokens-ids").first.locator("code")).to_have_count(min(len(row["ids"]), 8))
    page.locator("[data-token='0']").hover()
    expect(shown.locator(".tokens-kept dd")).to_have_text("not sampled")


def test_a_kept_set_that_is_missing_is_said_to_be(columns_url: str, opened: Opened) -> None:
    page, shown = tokens(opened, columns_url, "long", 0)
    found = columns(columns_url, "long", 0)
    first = next(at for at, row in enumerate(found["kept"]) if row is not None)
    missing = next(at for at, row in enumerate(found["kept"]) if at > first and row is None)
    page.locator(f"[data-token='{missing}']").hover()
    expect(shown.locator(".tokens-kept .warn")).to_have_text("missing")


def test_experts_are_a_strip_of_a_column_for_each_layer(columns_url: str, opened: Opened) -> None:
    page, shown = tokens(opened, columns_url, "s", 1)
    hues: dict[int, set[str]] = {}
    for at in (0, 5, 12):
        page.locator(f"[data-token='{at}']").hover()
        layers = experts_at(at)
        said = " · ".join(f"layer {number}: {' '.join(map(str, each))}" for number, each in enumerate(layers))
        strip = shown.get_by_role("img", name=said, exact=True)
        expect(strip.locator(".expert-layer")).to_have_count(LAYERS)
        expect(strip.locator(".expert")).to_have_count(LAYERS * CHOSEN)
        colours = strip.locator(".expert").evaluate_all("cells => cells.map(e => getComputedStyle(e).backgroundColor)")
        for expert, colour in zip([each for layer in layers for each in layer], colours, strict=True):
            hues.setdefault(expert, set()).add(colour)
    assert all(len(each) == 1 for each in hues.values())
    assert len(set.union(*hues.values())) == len(hues) > 5


def test_the_last_token_has_no_experts_yet(columns_url: str, opened: Opened) -> None:
    page, shown = tokens(opened, columns_url, "s", 0)
    last = len(columns(columns_url, "s", 0)["kept"]) - 1
    page.locator(f"[data-token='{last}']").hover()
    expect(shown.locator(".tokens-experts dd")).to_have_text("none yet: no forward pass has taken in the last token")


def test_the_focus_moves_through_pages_with_the_keyboard(columns_url: str, opened: Opened) -> None:
    page, shown = tokens(opened, columns_url, "long", 0)
    page.locator("[data-token]").first.focus()
    page.keyboard.press("Control+Home")
    for at in (0, 63, 64, 130):
        page.goto(f"{columns_url}{session('long', f'?turn=0&show=tokens&at={at}')}")
        page.reload()
        expect(shown.get_by_role("img")).to_have_attribute("aria-label", _said(at))
    page.locator("[data-token='130']").focus()
    page.keyboard.press("Control+Home")
    expect(shown.get_by_role("img")).to_have_attribute("aria-label", _said(0))


def _said(at: int) -> str:
    return " · ".join(f"layer {number}: {' '.join(map(str, each))}" for number, each in enumerate(experts_at(at)))


def test_only_what_a_session_recorded_is_there(columns_url: str, opened: Opened) -> None:
    _, shown = tokens(opened, columns_url, "dense", 0)
    expect(shown.locator(".tokens-kept")).to_be_visible()
    expect(shown.locator(".tokens-experts")).to_have_count(0)
    page, shown = tokens(opened, columns_url, "plain", 0)
    expect(page.get_by_role("region", name="The chosen token")).to_be_visible()
    expect(shown).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_screen_has_all_of_it_without_scrolling_sideways(
    columns_url: str, opened: Opened, axe: str, scheme: str
) -> None:
    page, shown = tokens(
        opened, columns_url, "s", 1, viewport={"width": 360, "height": 740}, color_scheme=scheme, bypass_csp=True
    )
    expect(shown.get_by_role("img")).to_be_visible()
    box = shown.bounding_box()
    assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= 360
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.evaluate(axe)
    found = page.evaluate("axe.run('section[aria-label=\"Recorded beside the chosen token\"]')")
    assert [each["id"] for each in found["violations"]] == []


def test_a_turn_says_what_it_recorded(columns_url: str, opened: Opened) -> None:
    replay = httpx.get(f"{columns_url}/rl/sessions/long/interactions/0?include=replay").json()["replay"]
    page = opened(f"{columns_url}{session('long', '?turn=0')}")
    wait(page, "main .turn h2")
    kept, experts = replay["kept"], replay["routed_experts"]
    assert kept["missing"] > 0 == experts["missing"]
    said = page.locator(".turn-recorded")
    expect(said).to_contain_text(f"kept sets: {kept['missing']} of {kept['rows']} tokens missing")
    expect(said).to_contain_text(f"routed experts: all {experts['rows']} positions")
    expect(page.locator(".turn-notes")).to_have_count(0)
    page.goto(f"{columns_url}{session('plain', '?turn=0')}")
    expect(page.locator(".turn-head h2")).to_have_text("Turn 0")
    expect(page.locator(".turn-recorded")).to_have_count(0)
