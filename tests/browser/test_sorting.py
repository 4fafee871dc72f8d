"""Sorting the list of sessions: headings, keys, addresses, the ten worst of a step, filters that a browser keeps."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.views import ROWS, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

NAMES = f"{ROWS} td:first-child a"


def listed(url: str, **query: Any) -> list[str]:
    answer = httpx.get(f"{url}/rl/sessions", params=query)
    assert answer.status_code == 200, answer.text
    return [entry["session_id"] for entry in answer.json()["sessions"]]


def sessions(opened: Opened, url: str, rest: str = "") -> Page:
    page = opened(f"{url}/#/sessions{rest}")
    wait(page, ROWS)
    return page


def heading(page: Page, name: str) -> Any:
    return page.get_by_role("columnheader", name=name, exact=True)


def test_a_heading_sorts_by_mouse_and_keyboard_and_says_so(url: str, opened: Opened) -> None:
    page = sessions(opened, url, "?search=sum-2")
    expect(heading(page, "Started")).to_have_attribute("aria-sort", "descending")
    heading(page, "Reward").get_by_role("button").click()
    expect(page).to_have_url(re.compile("order=-reward"))
    expect(heading(page, "Reward")).to_have_attribute("aria-sort", "descending")
    expect(heading(page, "Started")).not_to_have_attribute("aria-sort", re.compile(".*"))
    best = listed(url, order="-reward", filter='{"search": "sum-2"}')
    expect(page.locator(NAMES)).to_have_text(best)
    heading(page, "Reward").get_by_role("button").press("Enter")
    expect(heading(page, "Reward")).to_have_attribute("aria-sort", "ascending")
    expect(page.locator(NAMES)).to_have_text(listed(url, order="reward", filter='{"search": "sum-2"}'))
    expect(heading(page, "Reward").get_by_role("button")).to_be_focused()
    page.reload()
    expect(heading(page, "Reward")).to_have_attribute("aria-sort", "ascending")


@pytest.mark.parametrize("title", ["Turns", "Lost", "Forks", "Prompt", "Output", "Lasted", "Started"])
def test_each_number_can_be_sorted_by(url: str, opened: Opened, title: str) -> None:
    page = sessions(opened, url, "?group=forks")
    heading(page, title).get_by_role("button").click()
    expect(heading(page, title)).to_have_attribute("aria-sort", re.compile("scending"))
    order = re.search(r"order=([^&]+)", page.url)
    assert order is not None
    expect(page.locator(NAMES)).to_have_text(listed(url, order=order[1], filter='{"group_id": "forks"}'))


def test_any_key_of_metadata_can_be_sorted_by_and_selected(url: str, opened: Opened) -> None:
    page = sessions(opened, url, "?metadata=project%3Dsums")
    page.get_by_label("Order").select_option("metadata.step, downwards")
    filter = '{"metadata": {"project": "sums"}}'
    expect(page.locator(NAMES)).to_have_text(listed(url, order="-metadata.step", filter=filter))
    expect(heading(page, "step")).to_have_attribute("aria-sort", "descending")
    field = page.get_by_label("Metadata")
    field.fill("project=sums, step")
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("project=sums, step>=3")
    expect(field).not_to_have_attribute("aria-invalid", "true")
    filter = '{"metadata": {"project": "sums", "step": {"min": 3}}}'
    expect(page.locator(NAMES)).to_have_text(listed(url, order="-metadata.step", filter=filter))


def test_a_metadata_filter_that_cannot_be_read_is_named_by_the_server(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions?metadata=step")
    opened.watched.allow("400")
    expect(page.get_by_role("alert")).to_contain_text("filter.metadata")


def test_the_ten_worst_and_the_ten_best_are_one_click_away(url: str, opened: Opened) -> None:
    page = sessions(opened, url)
    page.get_by_role("link", name="ten worst").click()
    expect(page.locator(NAMES)).to_have_text(listed(url, order="reward", limit=10))
    page.get_by_role("link", name="show all").click()
    expect(page.get_by_role("status").filter(has_text=re.compile(r"^\d+ sessions$"))).to_be_visible()
    page.get_by_role("link", name="ten best").click()
    expect(page.locator(NAMES)).to_have_text(listed(url, order="-reward", limit=10))


def test_a_step_of_a_trainer_leads_to_its_ten_worst(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/training/grpo/2")
    page.get_by_role("link", name="ten worst").click()
    expect(page.locator(NAMES)).to_have_text(listed(url, order="reward", limit=10, filter='{"trained_in": "grpo/2"}'))
    expect(page.get_by_label("Trained in")).to_have_value("grpo/2")
    page.goto(f"{url}/#/training?trainer=grpo")
    page.get_by_role("row", name=re.compile("^1 ")).get_by_role("link", name="ten best").click()
    expect(page.locator(NAMES)).to_have_text(listed(url, order="-reward", limit=10, filter='{"trained_in": "grpo/1"}'))


def test_a_step_of_a_run_leads_to_its_ten_worst(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/runs?run=project&runs=sums")
    region = page.get_by_role("region", name="Lowest rewards of sums")
    region.get_by_label("Step").select_option("2")
    expect(region.get_by_role("heading")).to_have_text("sums, step 2: lowest rewards")
    shown = region.locator("tbody th").all_inner_texts()
    region.get_by_role("link", name="ten worst").click()
    filter = '{"metadata": {"project": "sums", "step": 2}, "validation": "skip", "withdrawn": false}'
    found = listed(url, order="reward", limit=10, filter=filter)
    expect(page.locator(NAMES)).to_have_text(found)
    assert shown == found


def test_filters_are_saved_under_a_name_in_this_browser_and_forgotten(url: str, opened: Opened) -> None:
    page = sessions(opened, url, "?group=sum-2&order=reward")
    page.get_by_text("Saved filters").click()
    page.get_by_label("Name of the saved filter").fill("worst <b>of sum-2</b>")
    page.get_by_role("button", name="Save this view").click()
    page.goto(f"{url}/#/overview")
    page.goto(f"{url}/#/sessions")
    wait(page, ROWS)
    page.get_by_text("Saved filters").click()
    page.get_by_role("link", name="worst <b>of sum-2</b>").click()
    expect(page).to_have_url(re.compile(r"#/sessions\?group=sum-2&order=reward$"))
    expect(page.locator(NAMES)).to_have_text(listed(url, order="reward", filter='{"group_id": "sum-2"}'))
    page.get_by_role("button", name="Forget worst <b>of sum-2</b>").click()
    expect(page.get_by_role("link", name="worst <b>of sum-2</b>")).to_have_count(0)
    assert page.evaluate("localStorage.length") == 0


def test_a_session_moves_when_its_reward_changes(url: str, opened: Opened) -> None:
    names = [f"moves-{at}" for at in range(3)]
    for at, name in enumerate(names):
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
        httpx.post(f"{url}/{name}/v1/chat/completions", json=body).raise_for_status()
        httpx.post(f"{url}/{name}/rl/set_reward", json={"reward": at}).raise_for_status()
    page = sessions(opened, url, "?search=moves-&order=reward")
    expect(page.locator(NAMES)).to_have_text(names)
    httpx.post(f"{url}/{names[0]}/rl/set_reward", json={"reward": 5}).raise_for_status()
    expect(page.locator(NAMES)).to_have_text([names[1], names[2], names[0]])
    for name in names:
        httpx.delete(f"{url}/rl/sessions/{name}").raise_for_status()


def test_more_sessions_than_are_sorted_say_so(many_url: str, opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    from proxy.api import sorted_listing

    monkeypatch.setattr(sorted_listing, "MOST_SORTED", 500)  # the server runs in this process
    page = sessions(opened, many_url, "?order=-reward")
    expect(page.get_by_role("status").filter(has_text="Older sessions are not in this list")).to_contain_text("500")
    page.get_by_label("Group").first.fill("group-0001")
    expect(page.locator(ROWS)).to_have_count(8)
    expect(page.get_by_text("Older sessions are not in this list")).to_have_count(0)
