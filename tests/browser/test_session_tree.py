"""The view of one session: its tree, what keys and clicks do in it, what a fork says, and how it follows what runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import expect

from tests.browser import episodes
from tests.browser.conftest import Opened
from tests.browser.views import session, wait

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

FORKED, FAILED = session(episodes.FORKED), session("failures/all")


def chosen(page: Page) -> Locator:
    return page.locator("[role=treeitem][aria-selected=true]")


def number_of(row: Locator) -> str:
    return row.locator(".tree-turn").inner_text().split()[-1]


def show_turn(page: Page, number: int) -> Locator:
    """Return the row of a complete turn."""
    return page.get_by_role("treeitem").filter(
        has=page.locator(".tree-turn", has_text=re.compile(rf"turn\s+{number}\b"))
    )


def say(url: str, name: str, *texts: str) -> None:
    """Run a turn of its own conversation in a session."""
    body = {"model": "any", "max_tokens": 8, "messages": [{"role": "user", "content": text} for text in texts]}
    httpx.post(f"{url}/{name}/v1/chat/completions", json=body, timeout=60).raise_for_status()


def test_every_interaction_has_a_row_and_forks_stand_beside_the_line(url: str, opened: Opened) -> None:
    tree = httpx.get(f"{url}/rl/sessions/{episodes.FORKED}").json()
    page = opened(url + FORKED)
    expect(page.get_by_role("treeitem")).to_have_count(len(tree["interactions"]))
    lanes = page.get_by_role("treeitem").evaluate_all("rows => rows.map((row) => Number(row.ariaLevel))")
    assert lanes.count(1) > 1, lanes
    assert set(lanes) >= {1, 2}, lanes
    for reason in ("resampled", "branched", "rewritten", "tools changed", "system changed", "new root"):
        expect(page.get_by_role("treeitem").filter(has_text=reason).first).to_be_visible()


def test_what_failed_or_was_replaced_is_said_in_words(url: str, opened: Opened) -> None:
    page = opened(url + FAILED)
    for status in ("failed", "superseded", "aborted"):
        expect(page.get_by_role("treeitem").filter(has_text=status).first).to_be_visible()


def test_a_click_chooses_a_turn_and_the_address_names_it(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    show_turn(page, 3).click()
    expect(chosen(page)).to_have_count(1)
    assert number_of(chosen(page)) == "3"
    expect(page.get_by_role("heading", name="Turn 3")).to_be_visible()
    name = page.evaluate("location.hash").split("turn=")[1]
    assert name == httpx.get(f"{url}/rl/sessions/{episodes.FORKED}/interactions/3").json()["interaction_id"]


def test_keys_walk_the_tree_fold_its_branches_and_stop_at_its_ends(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    rows = page.get_by_role("treeitem")
    expect(rows.first).to_be_visible()
    count = rows.count()
    page.get_by_role("tree").focus()
    page.keyboard.press("End")
    expect(rows.last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowDown")
    expect(rows.last).to_have_attribute("aria-selected", "true")
    page.keyboard.press("Home")
    expect(rows.first).to_have_attribute("aria-selected", "true")
    active = page.get_by_role("tree").get_attribute("aria-activedescendant")
    assert chosen(page).get_attribute("id") == active
    page.keyboard.press("ArrowLeft")
    expect(rows.first).to_have_attribute("aria-expanded", "false")
    assert rows.count() < count
    page.keyboard.press("ArrowRight")
    expect(rows).to_have_count(count)
    page.keyboard.press("ArrowRight")
    expect(rows.nth(1)).to_have_attribute("aria-selected", "true")
    page.keyboard.press("ArrowLeft")
    expect(rows.first).to_have_attribute("aria-selected", "true")


def test_a_fork_says_why_and_leads_to_the_nearest_turn(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    fork = page.get_by_role("treeitem").filter(has_text="rewritten")
    fork.get_by_role("button", name="rewritten").click()
    expect(fork).to_contain_text("An earlier answer of the model was replaced")
    expect(fork).to_contain_text("Shall it rhyme, or not?")
    link = fork.get_by_role("link")
    nearest = link.inner_text().removeprefix("turn ")
    link.click()
    expect(page.get_by_role("heading", name=f"Turn {nearest}")).to_be_visible()
    assert number_of(chosen(page)) == nearest


def test_a_line_leads_from_the_chosen_fork_to_the_nearest_turn(url: str, opened: Opened) -> None:
    compared = httpx.get(f"{url}/rl/sessions/{episodes.FORKED}/interactions/6?include=compared").json()["compared"]
    page = opened(f"{url}{FORKED}?turn=6")
    near = page.get_by_role("treeitem").filter(has_text="nearest")
    expect(near).to_have_count(1)
    assert number_of(near) == str(compared["nearest"]["turn"])
    expect(page.locator(".tree-nearest")).to_be_attached()
    show_turn(page, 1).click()
    expect(page.locator(".tree-nearest")).to_have_count(0)


def test_the_next_fork_is_found_by_a_button_and_told_by_a_key(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    page.get_by_role("button", name="Next fork").click()
    expect(page.get_by_role("tree")).to_be_focused()
    page.keyboard.press("Enter")
    expect(chosen(page)).to_contain_text("Nearest:")


def test_a_folded_branch_opens_for_the_turn_that_an_address_names(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    expect(page.get_by_role("treeitem").first).to_be_visible()
    hidden = page.locator("[role=treeitem][aria-level='2']").first
    number = number_of(hidden)
    page.get_by_role("button", name="Fold branches").click()
    expect(page.locator("[role=treeitem][aria-level='2']")).to_have_count(0)
    page.evaluate("(turn) => { location.hash = location.hash.split('?')[0] + '?turn=' + turn }", number)
    expect(chosen(page)).to_be_visible()
    assert number_of(chosen(page)) == number


def test_the_view_of_one_session_never_asks_for_turns_of_another(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    expect(page.get_by_role("region", name="Conversation")).to_be_visible()
    turns = httpx.get(f"{url}/rl/sessions/failures/all").json()["interactions"]
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("hash => { location.hash = hash; }", FAILED.removeprefix("/"))
    expect(page.get_by_role("treeitem")).to_have_count(len(turns))
    expect(page.get_by_role("region", name="Conversation")).to_be_visible()
    read = {address.split("/interactions/")[1].split("?")[0] for address in asked if "/interactions/" in address}
    assert read
    assert read <= {turn["interaction_id"] for turn in turns}


def test_a_call_that_runs_is_never_read_as_a_turn(url: str, opened: Opened) -> None:
    call = {"interaction_id": "runs", "begun_at": 1.0, "here": False, "parent_id": None, "api": None}
    tree = httpx.get(f"{url}/rl/sessions/{episodes.FORKED}", params={"include": "answer,running,score"}).json()
    tree["running"] = [{**call, "purpose": None, "agent": None, "prompt_tokens": None, "output_tokens": None}]
    page = opened(f"{url}/#/overview")
    page.route(re.compile(rf"/rl/sessions/{episodes.FORKED}\?"), lambda route: route.fulfill(json=tree))
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate("hash => { location.hash = hash; }", session(episodes.FORKED, "?turn=runs").removeprefix("/"))
    expect(page.get_by_role("heading", name="A call that runs")).to_be_visible()
    show_turn(page, 1).click()
    expect(page.get_by_role("heading", name="Turn 1", exact=True)).to_be_visible()
    assert not [address for address in asked if "/interactions/runs" in address]


def test_the_view_follows_a_session_without_moving_the_reader(url: str, opened: Opened) -> None:
    for number in range(45):
        say(url, "tree/follows", f"Task {number}")
    page = opened(f"{url}{session('tree/follows')}?turn=25")
    expect(chosen(page)).to_be_visible()
    list_ = page.get_by_role("tree")
    before = list_.evaluate("list => list.scrollTop")
    assert before > 0
    say(url, "tree/follows", "Task 0", "again")
    expect(page.locator(".session-facts")).to_contain_text("46 turns")
    assert list_.evaluate("list => list.scrollTop") == before
    assert number_of(chosen(page)) == "25"


def test_thousands_of_turns_have_rows_only_where_they_are_seen(url: str, opened: Opened) -> None:
    """The rows that exist are few though the list is long, and the last is reached by a key."""
    tree = {
        "session_id": "huge", "status": "ended", "created_at": 0, "ended_at": 1, "metrics": {}, "metadata": {},
        "discount": 1, "credit": "tree", "unaligned": 0, "running": [], "score": None, "left_out": None, "version": 0,
        "interactions": [_node(number) for number in range(5000)],
    }  # fmt: skip
    page = opened(f"{url}/#/sessions")
    page.route("**/rl/sessions/huge?**", lambda route: route.fulfill(json=tree))
    page.route("**/rl/sessions/huge/interactions/**", lambda route: route.fulfill(status=404, json=_GONE))
    opened.watched.allow("404")
    page.goto(f"{url}{session('huge')}")
    expect(page.get_by_role("treeitem").first).to_be_visible()
    assert page.get_by_role("treeitem").count() < 100
    page.get_by_role("tree").focus()
    page.keyboard.press("End")
    expect(chosen(page)).to_be_in_viewport()
    assert number_of(chosen(page)) == "4999"
    assert page.get_by_role("treeitem").count() < 100


_GONE = {"error": {"message": "gone", "type": "invalid_request_error", "param": None, "code": "not_found"}}


def _node(number: int) -> dict[str, object]:
    parent = None if number == 0 else f"n{number - 1}"
    return {
        "interaction_id": f"n{number}", "parent_id": parent, "aligned": True, "seq": number, "turn": number,
        "reason": "continued" if number else "first", "status": "complete", "purpose": "main", "agent": None,
        "reward": None, "rewards": {}, "return": 0, "prompt_tokens": number, "output_tokens": 1, "trainable": True,
        "spans": [], "versions": [[1, 0]], "model": "m", "error": None, "notes": {},
        "answer": {"text": f"answer {number}", "calls": []},
    }  # fmt: skip


def test_a_session_that_is_not_there_says_so_and_leads_on(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    opened.watched.allow("404")
    page.goto(f"{url}{session('no-such-session')}")
    expect(page.get_by_role("alert")).to_contain_text("there is no session 'no-such-session'")
    expect(page.get_by_role("link", name="All sessions")).to_be_visible()
    expect(page.get_by_role("heading", level=1)).to_have_text("no-such-session")


def test_the_tree_is_made_wider_by_keys_and_stays_so(url: str, opened: Opened) -> None:
    page = opened(url + FORKED)
    bar = page.get_by_role("separator")
    bar.focus()
    page.keyboard.press("ArrowRight")
    wide = bar.get_attribute("aria-valuenow")
    page.keyboard.press("End")
    expect(bar).to_have_attribute("aria-valuenow", "75")
    assert wide == "48"
    page.reload()
    wait(page)
    expect(page.get_by_role("separator")).to_have_attribute("aria-valuenow", "75")
