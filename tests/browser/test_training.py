"""What trainers told, in Chromium: steps in charts and tables, the turns of a step, and streams on tokens."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import httpx
from playwright.sync_api import Page, expect

from tests.browser.episodes import TOLD
from tests.browser.views import session, wait

if TYPE_CHECKING:
    from tests.browser.conftest import Opened


def get(url: str, path: str) -> Any:
    answer = httpx.get(url + path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def training(opened: Opened, url: str, rest: str = "") -> Page:
    page = opened(f"{url}/#/training{rest}")
    wait(page)
    return page


def test_the_steps_of_a_trainer_are_drawn_and_listed(url: str, opened: Opened) -> None:
    steps = [step for step in get(url, "/trajectories/steps")["steps"] if step["trainer"] == "grpo"]
    page = training(opened, url, "?trainer=grpo")
    expect(page.locator("main canvas")).to_have_count(4)
    rows = page.get_by_role("region", name="Steps").locator("tbody tr")
    expect(rows).to_have_count(len(steps))
    for row, step in zip(rows.all(), steps, strict=True):
        expect(row.locator("th")).to_have_text(str(step["step"]))
        expect(row.locator("td").nth(2)).to_have_text(str(step["tokens"]))
        expect(row.locator("td").nth(3)).to_have_text(str(step["masked"]))
    page.get_by_role("button", name="Tables").click()
    table = page.get_by_role("group", name="Tokens, as a table")
    expect(table.locator("thead th")).to_have_text(["step", "trained", "masked", "clipped"])
    newest = [int(text) for text in table.locator("tbody tr").first.locator("td").all_inner_texts()]
    assert newest == [steps[0]["tokens"] - steps[0]["masked"], steps[0]["masked"], steps[0]["clipped"]]


def test_another_trainer_can_be_chosen(url: str, opened: Opened) -> None:
    page = training(opened, url, "?trainer=grpo")
    page.get_by_role("combobox", name="Trainer").select_option("critic")
    expect(page).to_have_url(re.compile(r"trainer=critic"))
    expect(page.get_by_role("region", name="Steps").locator("tbody tr")).to_have_count(1)


def test_a_step_leads_to_the_tokens_of_its_turns(url: str, opened: Opened) -> None:
    page = training(opened, url, "/grpo/1")
    turns = get(url, "/trajectories/steps/grpo/1")["turns"]
    expect(page.get_by_role("heading", name="Step 1 of grpo")).to_be_visible()
    expect(page.get_by_role("region", name="Turns").locator("tbody tr")).to_have_count(len(turns))
    page.get_by_role("link", name="its tokens").first.click()
    expect(page.get_by_role("grid", name="Tokens")).to_be_visible()


def test_an_unknown_step_is_said_to_be_unknown(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/training/grpo/999")
    opened.watched.allow("status of 404")
    expect(page.get_by_role("alert")).to_contain_text("told nothing of step 999")


def test_a_stream_colours_the_tokens_and_is_in_the_details(url: str, opened: Opened) -> None:
    page = opened(url + session(TOLD, "?turn=0&show=tokens"))
    wait(page)
    told = get(url, f"/rl/sessions/{TOLD}/interactions/0?include=annotations,tokens")
    start = next(part["start"] for part in told["tokens"]["parts"] if part["kind"] == "output")
    (streams,) = [each["streams"] for each in told["annotations"] if each["trainer"] == "grpo"]
    page.get_by_role("combobox", name="Trainer").select_option(label="grpo, step 1: is_masked")
    expect(page).to_have_url(re.compile("colour=stream"))
    for at, value in enumerate(streams["is_masked"]):
        cell = page.locator(f'[data-token="{start + at}"]')
        expect(cell).to_have_class(re.compile(rf"\bk{5 if value else 1}\b"))
    cell.hover()
    fact = page.locator(".tokens-details > div").filter(has_text="grpo, step 1: is_masked").locator("dd")
    expect(fact).to_have_text(f"{streams['is_masked'][-1]:g}")
    expect(page.get_by_role("list", name="Colours")).to_contain_text("≤ 0")
    page.get_by_role("combobox", name="Trainer").select_option(value="")
    expect(page).not_to_have_url(re.compile("stream"))


def test_a_session_that_nobody_told_of_has_no_choice_of_streams(url: str, opened: Opened) -> None:
    page = opened(url + session("failures/all", "?turn=0&show=tokens"))
    wait(page)
    expect(page.get_by_role("grid", name="Tokens")).to_be_visible()
    expect(page.get_by_role("combobox", name="Trainer")).to_have_count(0)
