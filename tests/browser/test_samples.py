"""What each sample of an export contains, as the page shows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import expect

from tests.browser import episodes
from tests.browser.conftest import Opened
from tests.browser.views import session, wait

if TYPE_CHECKING:
    from typing import Any

SAMPLES = "?show=samples"


def outlined(url: str, **options: Any) -> Any:
    body = {"outline": True, "session_id": episodes.FORKED, **options}
    return httpx.post(f"{url}/trajectories/export", json=body).raise_for_status().json()


def test_there_is_a_bar_for_each_sample_of_the_layout_in_the_address(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, SAMPLES))
    wait(page)
    found = outlined(url)
    expect(page.locator(".samples-sum")).to_contain_text(f"{len(found['samples'])} samples")
    expect(page.locator(".samples-sum")).to_contain_text(f"{found['sessions'][0]['trained_tokens']} of")
    page.get_by_label("Layout").select_option("individual")
    found = outlined(url, layout="individual")
    expect(page.locator(".samples-sum")).to_contain_text(f"{len(found['samples'])} samples")
    assert "layout=individual" in page.evaluate("location.hash")
    page.get_by_label("Layout").select_option("tree")
    expect(page.locator(".samples-sum")).to_contain_text("1 sample;")


def test_a_chosen_sample_lists_its_turns_which_lead_to_turn_and_tokens(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, SAMPLES))
    page.get_by_role("button", name="Sample 1", exact=True).click()
    turns = page.get_by_role("table", name="Turns of sample 1")
    sample = outlined(url)["samples"][1]
    expect(turns.get_by_role("row")).to_have_count(len(sample["turns"]) + 1)
    expect(turns).to_contain_text("trained in another sample")
    turns.get_by_role("link", name="show").last.click()
    last = sample["turns"][-1]["interaction_id"]
    page.wait_for_function("(id) => location.hash.includes(id) && location.hash.includes('show=tokens')", arg=last)


def test_advantages_compare_the_whole_group(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, f"{SAMPLES}&advantages=grpo"))
    expect(page.locator(".samples-sum")).to_contain_text("compared in a group")
    expect(page.locator(".sample-worth").first).to_contain_text("advantage")


def test_a_padded_row_has_its_lengths_and_its_padding(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, f"{SAMPLES}&layout=padded&prompt_length=600&response_length=200"))
    expect(page.locator(".sample").first).to_contain_text("800 tokens")
    expect(page.locator(".sample .piece.padding").first).to_be_attached()
    expect(page.get_by_label("Response")).to_have_value("200")


def test_an_export_that_is_refused_says_why(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    opened.watched.allow("400")
    wait(page)
    query = f"{SAMPLES}&layout=padded&prompt_length=1&response_length=1&on_too_long=refuse"
    page.goto(url + session(episodes.FORKED, query))
    expect(page.get_by_role("alert")).to_contain_text("do not fit")
