"""The token view in Chromium: cells, colours, keys, jumps, search, and sixty thousand tokens."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import httpx
from playwright.sync_api import Locator, Page, expect

from tests.browser.episodes import FORKED, HOSTILE, LONG_PATH, LONG_TOKENS
from tests.browser.views import session, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Open

MINUS = "\u2212"
MOST_ELEMENTS = 4000
"""In the document, however many tokens there are."""


def told(url: str, name: str, turn: int) -> Any:
    """The tokens of a turn as the API has them."""
    answer = httpx.get(f"{url}/rl/sessions/{name}/interactions/{turn}", params={"include": "tokens"})
    assert answer.status_code == 200, answer.text
    return answer.json()["tokens"]


def tokens(opened: Open, url: str, name: str, query: str = "") -> Page:
    page = opened(url + session(name, f"?show=tokens{query}"))
    wait(page)
    expect(page.get_by_role("grid", name="Tokens")).to_be_visible()
    return page


def cell(page: Page, at: int) -> Locator:
    return page.locator(f'[data-token="{at}"]')


def fact(page: Page, name: str) -> Locator:
    """A value of the panel below the cells."""
    return page.locator(".tokens-details > div").filter(has=page.get_by_text(name, exact=True)).locator("dd")


def test_a_hovered_token_shows_all_that_is_known_of_it(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, FORKED, "&turn=2"), told(url, FORKED, 2)
    for at in (len(known["ids"]) - 1, next(part["start"] for part in known["parts"] if part["kind"] == "output")):
        cell(page, at).scroll_into_view_if_needed()
        cell(page, at).hover()
        expect(fact(page, "Token")).to_have_text(f"{at} of {len(known['ids'])}")
        expect(fact(page, "Id")).to_have_text(str(known["ids"][at]))
        expect(fact(page, "Logprob")).to_have_text(f"{known['logprobs'][at]:.4f}".replace("-", MINUS))
        expect(fact(page, "Probability")).to_contain_text(re.compile(r"\d%"))
        expect(fact(page, "Version")).to_have_text(re.compile(r"^v\d+$"))
        expect(fact(page, "State")).to_contain_text("is trained, in one sample of the export")


def test_each_cell_shows_its_text_with_white_space(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, FORKED, "&turn=0"), told(url, FORKED, 0)
    page.locator(".tokens-grid").evaluate("grid => grid.scrollTop = 0")
    for at in range(40):
        text = known["texts"][at].replace(" ", "·").replace("\n", "⏎")
        expect(cell(page, at)).to_have_text(text)


def test_the_keys_move_the_focus_and_the_panel_follows(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, FORKED, "&turn=2"), told(url, FORKED, 2)
    start = next(part["start"] for part in reversed(known["parts"]) if part["kind"] == "output")
    expect(page.locator('[data-token][tabindex="0"]')).to_have_count(1)
    cell(page, start).focus()
    page.keyboard.press("ArrowRight")
    expect(cell(page, start + 1)).to_be_focused()
    expect(fact(page, "Token")).to_contain_text(f"{start + 1} of")
    page.keyboard.press("Control+Home")
    expect(cell(page, 0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    expect(fact(page, "Text")).to_contain_text("\\n")
    page.keyboard.press("Control+End")
    expect(cell(page, len(known["ids"]) - 1)).to_be_focused()
    expect(page).to_have_url(re.compile(rf"at={len(known['ids']) - 1}"))


def test_what_is_not_trained_is_marked_with_why(url: str, opened: Open) -> None:
    page = tokens(opened, url, "marks/spans", "&turn=0&colour=mask")
    known = told(url, "marks/spans", 0)
    left = [run for run in known["states"] if run["state"] == "mark"]
    expect(page.locator(".token.untrained:not([aria-hidden])")).to_have_count(
        sum(run["end"] - run["start"] for run in left)
    )
    expect(page.locator(".tokens-tag", has_text="✕mark").first).to_be_visible()
    cell(page, known["parts"][0]["start"]).click()
    page.get_by_role("button", name="Next untrained").click()
    expect(cell(page, left[0]["start"])).to_be_focused()
    expect(fact(page, "State")).to_have_text("mark was marked with trainable: false, or is outside the marked spans")
    page.get_by_role("button", name="Next untrained").click()
    expect(cell(page, left[1]["start"])).to_be_focused()


def test_the_options_of_the_export_change_what_is_trained(url: str, opened: Open) -> None:
    page = tokens(opened, url, FORKED, "&turn=2&colour=mask")
    expect(page.locator(".tokens-head.output").first).to_contain_text("✓ trained")
    page.get_by_role("combobox", name="Train", exact=True).select_option("last")
    expect(page.locator(".tokens-head.output").first).to_contain_text("✕ not trained: train")
    expect(page).to_have_url(re.compile("train=last"))
    page.get_by_role("combobox", name="Layout", exact=True).select_option("tree")
    expect(page.get_by_role("combobox", name="Drift", exact=True)).to_be_disabled()
    expect(page.locator(".tokens-legend")).to_contain_text("not trained: train")


def test_the_options_of_the_samples_lead_to_their_tokens(url: str, opened: Open) -> None:
    for options in ("layout=padded&keep=tail", "layout=tree&drift=mask"):
        page = opened(url + session(FORKED, f"?show=samples&{options}"))
        expect(page.get_by_role("button", name="Sample 0")).to_be_visible()
        page.get_by_role("link", name="Tokens", exact=True).click()
        expect(page.get_by_role("grid", name="Tokens")).to_be_visible()
        page.close()


def test_a_choice_right_after_a_move_is_kept(url: str, opened: Open) -> None:
    page = tokens(opened, url, FORKED, "&turn=2")
    page.locator("[data-token]").last.click()
    page.keyboard.press("ArrowLeft")
    page.get_by_role("button", name="Version").click()
    expect(page).to_have_url(re.compile(r"at=\d+"))
    expect(page).to_have_url(re.compile("colour=version"))
    expect(page.get_by_role("button", name="Version")).to_have_attribute("aria-pressed", "true")


def test_the_lowest_logprob_is_found_and_then_the_next(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, FORKED, "&turn=2"), told(url, FORKED, 2)
    lowest = sorted((value, at) for at, value in enumerate(known["logprobs"]) if value is not None)
    for value, at in lowest[:2]:
        page.get_by_role("button", name="Lowest logprob").click()
        expect(cell(page, at)).to_be_focused()
        expect(fact(page, "Logprob")).to_have_text(f"{value:.4f}".replace("-", MINUS))
    assert math.exp(lowest[0][0]) < 0.5


def test_weight_versions_are_named_where_they_change(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, "versions/three", "&turn=3&colour=version"), told(url, "versions/three", 3)
    versions = sorted({run["version"] for run in known["versions"]})
    assert len(versions) >= 3
    for version in versions:
        expect(page.locator(".tokens-keys")).to_contain_text(f"v{version}")
    last = known["parts"][-1]
    within = [run for run in known["versions"] if last["start"] < run["start"] < last["end"]]
    assert within
    for run in within:
        expect(page.locator(".tokens-tag", has_text=f"v{run['version']}").last).to_be_attached()


def test_a_prompt_that_was_rendered_anew_says_where_it_differs(url: str, opened: Open) -> None:
    page, known = tokens(opened, url, "forks/template", "&turn=3"), told(url, "forks/template", 3)
    note = page.get_by_role("note")
    expect(note).to_contain_text("does not begin with the tokens of turn 2")
    note.get_by_role("button", name="First difference").click()
    expect(cell(page, known["sections"][-1]["differs"]["index"])).to_be_focused()
    note.get_by_role("link", name="Tokens of turn 2").click()
    expect(page.get_by_role("note")).to_contain_text("does not begin with the tokens of turn 1")


def test_search_goes_from_place_to_place_and_says_when_there_is_none(url: str, opened: Open) -> None:
    page = tokens(opened, url, FORKED, "&turn=2")
    box = page.get_by_role("searchbox", name="Search in the tokens")
    box.fill("trees stand tall")
    expect(page.get_by_role("search").get_by_role("status")).to_have_text("1 place")
    box.press("Enter")
    expect(page.locator(".token.found").first).to_be_in_viewport()
    assert "".join(page.locator(".token.found").all_inner_texts()).lower() == "trees·stand·tall"
    box.fill("no such text")
    expect(page.get_by_role("search").get_by_role("status")).to_have_text("not found")
    expect(page.locator(".token.found")).to_have_count(0)


def test_the_longest_path_is_scrolled_with_few_elements(url: str, opened: Open) -> None:
    page = tokens(opened, url, LONG_PATH, "&turn=4")
    grid = page.get_by_role("grid", name="Tokens")
    assert int(grid.get_attribute("aria-rowcount") or 0) > 1000
    for share in (0, 0.3, 0.9):
        grid.evaluate("(grid, share) => grid.scrollTop = share * grid.scrollHeight", share)
        expect(page.locator(".tokens-row").nth(10)).to_be_in_viewport()
        assert page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
    grid.locator('[tabindex="0"][data-token]').focus()  # the row of the focus stays, wherever the others are
    page.keyboard.press("Control+End")
    expect(page.locator(".token:focus")).to_be_in_viewport()
    assert int(page.locator(".token:focus").get_attribute("data-token") or 0) > LONG_TOKENS
    strip = page.locator(".tokens-strip canvas")
    box = strip.bounding_box()
    assert box is not None
    page.mouse.click(box["x"] + 5, box["y"] + 2)
    expect(cell(page, 0)).to_be_in_viewport()


def test_texts_of_agents_are_texts_in_cells(url: str, opened: Open) -> None:
    page = tokens(opened, url, HOSTILE, "&turn=0&colour=mask")
    page.locator(".tokens-grid").evaluate("grid => grid.scrollTop = grid.scrollHeight / 2")
    expect(page.locator(".tokens-row").first).to_be_attached()
    assert page.locator(".tokens-grid :not(div, span, strong)").count() == 0


def test_a_turn_that_failed_has_tokens_too(url: str, opened: Open) -> None:
    tree = httpx.get(f"{url}/rl/sessions/failures/all").json()["interactions"]
    failed = [node for node in tree if node["status"] != "complete"]
    assert failed
    for node in failed[:2]:
        page = opened(url + session("failures/all", f"?show=tokens&turn={node['interaction_id']}"))
        wait(page)
        expect(page.locator(".tokens")).to_be_visible()
        expect(page.locator(".tokens-head, .empty").first).to_be_visible()
