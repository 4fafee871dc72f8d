"""The groups and one group: distributions of rewards and returns, and its sessions side by side."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from uuid import uuid4

import httpx
from playwright.sync_api import expect

from tests.browser import hostile
from tests.browser.test_session_list import ask, names, post, row
from tests.browser.views import wait

if TYPE_CHECKING:
    from tests.browser.conftest import Open


def test_each_group_has_a_distribution_and_leads_to_its_page(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/groups")
    wait(page)
    expect(row(page, "sum-0").get_by_role("img", name="Scores: 0, 0.25, 1, 1")).to_be_visible()
    expect(row(page, "sum-1")).to_contain_text("equal")
    page.get_by_label("Search").fill("sum-2")
    expect(page.locator("tbody tr[data-row]")).to_have_count(1)
    row(page, "sum-2").get_by_role("link", name="sum-2", exact=True).click()
    expect(page).to_have_url(re.compile(r"#/groups/sum-2$"))
    expect(page.get_by_role("heading", level=1)).to_have_text("Group sum-2")


def test_a_group_shows_its_spread_and_its_sessions_side_by_side(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/groups/sum-2")
    wait(page)
    group = httpx.get(f"{url}/rl/groups", params={"filter": '{"group_id": "sum-2"}'}).json()["groups"][0]
    rewards = page.get_by_role("region", name="Rewards")
    expect(rewards).to_contain_text(f"mean {round(group['mean'], 3)} ± {round(group['std'], 3)}")
    expect(rewards.get_by_role("img", name=re.compile("8 values, .1 to .0.8: 1 session"))).to_be_visible()
    expect(page.get_by_role("region", name="Returns").get_by_role("img")).to_be_visible()
    assert names(page)[0] == "sum-2-4" and names(page)[-1] == "sum-2-5"  # from reward 1 to -1
    expect(row(page, "sum-2-5").get_by_role("cell").nth(5)).to_have_text("\N{MINUS SIGN}1.96")
    page.get_by_label("Order").select_option("oldest first")
    expect(page.locator("tbody tr[data-row='0'] a")).to_have_text("sum-2-0")
    expect(page).to_have_url(re.compile(r"order=start"))
    page.get_by_role("link", name="In the list of sessions").click()
    expect(page.locator("tbody tr[data-row]")).to_have_count(8)
    page.go_back()
    page.get_by_role("link", name="sum-2-3", exact=True).click()
    expect(page).to_have_url(re.compile(r"#/session/sum-2-3$"))


def test_a_group_tells_how_many_tokens_its_samples_share(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/groups/sum-2")
    wait(page)
    body = {"filter": {"group_id": "sum-2", "validation": "include"}, "layout": "forest"}
    counts = httpx.post(f"{url}/trajectories/export", json=body).json()["forest"]
    assert counts["merged_tokens"] > 0
    page.get_by_role("button", name="Count shared tokens").click()
    told = f"{counts['rows']} samples of {counts['row_tokens']:,} tokens; {counts['tokens']:,} with shared tokens once"
    expect(page.get_by_text(told)).to_be_visible()


def test_a_group_that_is_not_there_says_so(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/groups/nobody")
    expect(page.get_by_role("heading", name="There is no such group")).to_be_visible()


def test_a_group_and_the_list_follow_what_happens(url: str, opened: Open) -> None:
    name = f"group-{uuid4().hex[:8]}/%3Cb%3E"
    page = opened(f"{url}/#/groups?search={name[:14]}")
    expect(page.get_by_role("heading", name="No group matches")).to_be_visible()
    sessions = [f"{name[:14]}-{number}" for number in range(2)]
    for session in sessions:
        post(url, "/rl/start_session", session_id=session, group_id=name)
    expect(row(page, name).get_by_role("cell").nth(2)).to_have_text("2")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text(f"Group {name}")
    expect(page.get_by_role("region", name="Rewards")).to_contain_text("No session has a reward yet")
    for session, reward in zip(sessions, (0, 1), strict=True):
        ask(url, session)
        post(url, f"/{session}/rl/end_session", reward=reward)
    expect(page.get_by_role("region", name="Rewards")).to_contain_text("mean 0.5 ± 0.707")
    expect(row(page, sessions[1]).get_by_role("cell").nth(4)).to_have_text("+0.50")
    for session in sessions:
        httpx.request("DELETE", f"{url}/rl/sessions/{session}").raise_for_status()
    expect(page.get_by_role("heading", name="There is no such group")).to_be_visible()


def test_a_hostile_name_leads_to_its_group_and_back_to_its_sessions(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions?search=hostile/texts")
    row(page, "hostile/texts").get_by_role("cell").nth(3).get_by_role("link").click()
    expect(page.get_by_label("Group")).to_have_value(hostile.CLOSING)
    expect(page.locator("tbody tr[data-row]")).to_have_count(1 + len(hostile.SESSION_IDS))
    page.get_by_role("link", name="Groups", exact=True).click()
    page.get_by_label("Search").fill(hostile.CLOSING[:100])
    expect(page.locator("tbody tr[data-row]")).to_have_count(1)
    page.locator("tbody tr[data-row] a").click()
    expect(page.get_by_role("heading", level=1).locator("bdi")).to_have_attribute("title", hostile.CLOSING)
    expect(page.locator("tbody tr[data-row]")).to_have_count(1 + len(hostile.SESSION_IDS))
