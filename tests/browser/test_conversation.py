"""A session read as a conversation, two sessions side by side, and a person's reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser import data, episodes, servers
from tests.browser.conftest import WAIT_MS
from tests.browser.views import session, wait
from tests.support import default_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.browser.conftest import Opened

CHAIN = "chain/plain"
ENDLESS, MANY_TURNS = "long/thousand", 1000
NARROW = {"width": 400, "height": 800}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder: Path = tmp_path_factory.mktemp("conversation")
    database = servers.kinds_database(folder)
    data.fill_long(database, ENDLESS, MANY_TURNS)
    with servers.serving(database) as served:
        yield served


def test_a_conversation_has_each_message_once_and_j_and_k_go_through_it(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"))
    messages = page.locator(".episode .turn-message")
    expect(messages).to_have_count(13)  # system, user, six answers, five results
    wait(page)
    for _ in range(4):
        page.keyboard.press("j")
    expect(messages.nth(3)).to_be_focused()
    expect(messages.nth(3)).to_contain_text("result of run")
    page.keyboard.press("k")
    expect(messages.nth(2)).to_be_focused()
    expect(page).to_have_url(re.compile("&message=2$"))
    page.keyboard.press("k")
    page.keyboard.press("k")
    page.keyboard.press("k")
    expect(messages.nth(0)).to_be_focused()


def test_tools_are_folded_until_o_unfolds_all_of_them(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"))
    result = page.locator(".episode .turn-tool pre").first
    expect(page.locator(".episode .turn-tool").first).to_be_visible()
    expect(result).to_be_hidden()
    page.keyboard.press("j")
    page.keyboard.press("o")
    expect(result).to_be_visible()
    expect(page.locator(".episode .turn-message").first).to_be_focused()
    page.keyboard.press("o")
    expect(result).to_be_hidden()


def test_a_conversation_leads_to_the_other_ways_at_a_fork(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, "?show=conversation"))
    expect(page.locator(".episode")).to_contain_text("They never fall, they give us shade.")
    expect(page.locator(".episode")).not_to_contain_text("Then a free verse about an oak.")
    page.locator(".episode-others").nth(1).get_by_role("link", name="turn 5").click()
    expect(page.locator(".episode")).to_contain_text("Then a free verse about an oak.")
    expect(page.locator(".episode")).not_to_contain_text("They never fall")
    page.get_by_role("treeitem").filter(has_text="They never fall").click()
    expect(page.locator(".episode")).to_contain_text("They never fall, they give us shade.")


def test_who_goes_back_in_a_side_branch_stays_in_it(url: str, opened: Opened) -> None:
    page = opened(url + session(episodes.FORKED, "?show=conversation&turn=5"))
    branch = page.locator(".episode").get_by_text("Then a free verse about an oak.")
    expect(branch).to_be_visible()
    for _ in range(2):
        page.keyboard.press("k")
    expect(page.locator(".turn-message:focus")).to_contain_text("Write a poem about trees.")
    expect(page).to_have_url(re.compile("&message=1$"))
    expect(branch).to_be_visible()
    page.reload()
    expect(branch).to_be_visible()
    expect(page.get_by_text("2 of 5 messages")).to_be_visible()


def test_enter_unfolds_the_message_that_is_read(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"))
    results = page.locator(".episode .turn-tool pre")
    expect(page.locator(".episode .turn-tool").first).to_be_visible()
    for _ in range(4):
        page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(results.nth(0)).to_be_visible()
    expect(results.nth(1)).to_be_hidden()
    page.keyboard.press("Enter")
    expect(results.nth(0)).to_be_hidden()


def test_of_a_thousand_turns_those_around_the_place_are_drawn_and_j_goes_on(url: str, opened: Opened) -> None:
    page = opened(url + session(ENDLESS, "?show=conversation&turn=899"))
    turns = page.locator(".episode-turn")
    expect(page.locator(".episode").get_by_text("answer 899", exact=True)).to_be_in_viewport(timeout=4 * WAIT_MS)
    expect(turns).to_have_count(100)
    page.get_by_role("button", name="Show 50 of 849 earlier turns").click()
    expect(turns.first).to_contain_text("turn 799")
    page.goto(url + session(ENDLESS, "?show=conversation"))
    expect(turns).to_have_count(50, timeout=4 * WAIT_MS)
    page.locator(".episode").get_by_text("answer 48", exact=True).click()
    for _ in range(4):
        page.keyboard.press("j")
    expect(page.locator(".turn-message:focus")).to_contain_text("answer 50")
    expect(turns).to_have_count(99)


def test_a_new_turn_of_a_live_session_is_read_alone_and_appears_at_the_end(url: str, opened: Opened) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Say exactly: one"}]}
    said = httpx.post(f"{url}/live-talk/v1/chat/completions", json=body).json()["choices"][0]["message"]
    page = opened(url + session("live-talk", "?show=conversation"))
    expect(page.locator(".episode .turn-answer")).to_have_count(1)
    wait(page)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    more = [*body["messages"], said, {"role": "user", "content": "Say exactly: two"}]
    httpx.post(f"{url}/live-talk/v1/chat/completions", json={**body, "messages": more}).raise_for_status()
    expect(page.locator(".episode .turn-answer").nth(1)).to_contain_text("two")
    assert [each for each in asked if "include=added" in each and "/interactions/" not in each] == []


def test_keys_can_be_turned_off(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"))
    page.get_by_role("button", name="Keys on").click()
    page.keyboard.press("r")
    page.keyboard.press("j")
    expect(page.get_by_label("Name (optional)")).to_have_count(0)
    expect(page.locator(".turn-message:focus")).to_have_count(0)
    page.get_by_role("button", name="Keys off").click()
    page.keyboard.press("j")
    expect(page.locator(".turn-message:focus")).to_have_count(1)


def test_on_a_telephone_the_score_the_status_and_the_conversation_come_first(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"), viewport=NARROW)
    first = page.locator(".episode .turn-message").first
    expect(first).to_be_in_viewport()
    expect(page.get_by_text("1 score")).to_be_in_viewport()
    expect(page.locator(".session-head .badge").first).to_be_in_viewport()
    expect(page.get_by_role("tree")).to_be_hidden()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_letters_in_a_field_are_no_keys(url: str, opened: Opened) -> None:
    page = opened(url + session(CHAIN, "?show=conversation"))
    expect(page.locator(".episode .turn-message").first).to_be_visible()
    page.keyboard.press("r")
    name = page.get_by_label("Name (optional)")
    name.press_sequentially("jokr")
    expect(name).to_have_value("jokr")
    page.keyboard.press("Escape")
    expect(name).to_have_count(0)


def test_two_sessions_of_a_group_are_compared_from_where_they_part(url: str, opened: Opened) -> None:
    page = opened(url + session("sum-1-0"))
    page.get_by_role("link", name="compare…").click()
    page.get_by_role("link", name="sum-1-2").click()
    expect(page.get_by_role("heading", name="They differ after the first message")).to_be_visible()
    wait(page)
    rows = page.locator(".compare-row")
    expect(rows.first).to_contain_text("What is 0 and 0?")
    expect(rows.first).to_contain_text("What is 2 and 2?")
    expect(rows.first.locator("del")).to_have_text(["0", "0"])
    expect(rows.first.locator("ins")).to_have_text(["2", "2"])
    expect(rows.nth(1).locator("del")).to_have_count(0)
    rows.nth(1).get_by_text("Word by word").click()
    expect(rows.nth(1).locator("del").first).to_be_visible()
    page.get_by_text("The first message is equal").click()
    expect(page.locator(".turn-system")).to_have_count(1)
    page.get_by_role("button", name="Go to the first difference").click()
    expect(page.get_by_role("heading", name="They differ after the first message")).to_be_focused()
    expect(page.get_by_role("table", name="Figures that differ")).to_contain_text("metric tries")
    expect(page.get_by_role("table", name="Figures that differ")).to_contain_text("score")
    rows.first.get_by_role("link", name="in its conversation").last.click()
    expect(page.get_by_role("heading", name="sum-1-2")).to_be_visible()
    expect(page.locator(".episode").get_by_text("What is 2 and 2?")).to_be_in_viewport()


def test_the_best_and_the_worst_of_a_group_are_offered_and_two_can_be_chosen(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/groups/sum-2")
    chosen = page.get_by_role("group", name="Compare two sessions")
    expect(chosen.get_by_label("Session", exact=True)).to_have_value("sum-2-4")
    expect(chosen.get_by_label("Other session")).to_have_value("sum-2-5")
    chosen.get_by_label("Other session").select_option("sum-2-4")
    expect(chosen.get_by_role("link", name="Compare")).to_have_count(0)
    chosen.get_by_label("Other session").select_option("sum-2-3")
    chosen.get_by_role("link", name="Compare").click()
    expect(page.locator(".compare-row").first).to_be_visible()
    scores = page.get_by_role("table", name="Figures that differ").get_by_role("row", name="score differs 1 0.75")
    expect(scores).to_have_count(1)
    page.get_by_role("link", name="Compare with another session").click()
    ranked = page.locator(".compare-others li")
    expect(ranked.first).to_contain_text("best")
    expect(ranked.last).to_contain_text("worst")


def test_two_sessions_are_below_each_other_on_a_telephone(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/compare?a=chain/plain&b=chain/long", viewport=NARROW)
    expect(page.locator(".compare-row").first).to_be_visible()
    one, other = (each.bounding_box() for each in page.locator(".compare-row").first.locator(".compare-side").all())
    assert one is not None and other is not None and other["y"] >= one["y"] + one["height"]
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize(
    "address", ["/#/session/chain/plain", "/#/compare?a=sum-1-0&b=sum-1-2", "/#/compare?a=sum-1-0"]
)
def test_nothing_overflows_on_a_telephone_while_a_slow_server_is_asked(url: str, opened: Opened, address: str) -> None:
    page = opened(url, viewport=NARROW)
    page.route(re.compile("/rl/sessions"), lambda route: None)  # never answered
    page.goto(url + address)
    expect(page.locator("main .waiting").first).to_be_visible()
    assert page.evaluate(_BEYOND) == []
    page.context.close()


# Elements that are wider than the box which they are in, and those that reach beyond the screen.
_BEYOND = """
() => [...document.querySelectorAll("main, main *")].filter((each) => {
  const { right, width } = each.getBoundingClientRect();
  const beyond = right > innerWidth + 1 || each.scrollWidth > each.clientWidth + 1;
  return width > 1 && beyond && !each.closest(".visually-hidden, svg");
}).map((each) => `${each.tagName}.${each.className} ${each.scrollWidth} of ${each.clientWidth}`)
"""


def test_a_session_that_is_not_there_is_said_where_two_are_compared(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/compare?a=sum-1-0&b=nobody")
    opened.watched.allow("404")
    expect(page.get_by_role("alert")).to_contain_text("nobody")


def test_a_person_rewards_a_turn_by_a_key(url: str, opened: Opened) -> None:
    page = opened(url + session("sum-1-1", "?turn=0"))
    expect(page.get_by_role("button", name="Reward turn 0")).to_be_visible()
    page.keyboard.press("r")
    field = page.get_by_label("Reward of turn 0", exact=True)
    expect(field).to_be_focused()
    field.fill("0.25")
    page.get_by_label("Name (optional)").fill("human")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.get_by_text("Reward 0.25 set as human.")).to_be_visible()
    read = httpx.get(f"{url}/rl/sessions/{quote('sum-1-1')}").json()
    assert read["interactions"][0]["rewards"] == {"human": 0.25}
    expect(page.get_by_text("Named rewards (1)")).to_be_visible()
    page.keyboard.press("r")
    expect(page.get_by_text("It replaces 0.25.")).to_be_visible()
    expect(page.get_by_role("button", name="Replace")).to_be_visible()


def test_a_reward_that_is_refused_is_said_and_can_be_sent_again(url: str, opened: Opened) -> None:
    page = opened(url + session("sum-1-3"))
    expect(page.get_by_role("button", name="Reward the session")).to_be_visible()
    opened.watched.allow("503")
    refusal = {"error": {"message": "the database is away", "code": "database_unavailable"}}
    page.route("**/rl/set_reward", lambda route: route.fulfill(status=503, json=refusal), times=1)
    expect(page.get_by_role("button", name="Reward the session")).to_be_visible()
    page.keyboard.press("r")
    page.get_by_label("Reward of the session", exact=True).fill("1")
    page.get_by_label("Name (optional)").fill("good")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("the database is away")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.get_by_text("Reward 1 set as good.")).to_be_visible()


def test_a_reward_of_the_session_says_which_one_it_replaces_and_that_a_score_stays(url: str, opened: Opened) -> None:
    name = "rewards/whole"
    body = {"model": "m", "messages": [{"role": "user", "content": "Say exactly: one"}]}
    httpx.post(f"{url}/{name}/v1/chat/completions", json=body).raise_for_status()
    httpx.post(f"{url}/{name}/rl/set_reward", json={"reward": 0.5}).raise_for_status()
    page = opened(url + session(name))
    expect(page.get_by_role("button", name="Reward the session")).to_be_visible()
    page.keyboard.press("r")
    form = page.get_by_role("form", name="Reward the session")
    expect(form).to_contain_text("It goes to turn 0")
    expect(form).to_contain_text("It replaces 0.5.")
    form.get_by_label("Name (optional)").press_sequentially("Ada Lovelace")
    expect(form).not_to_contain_text("It replaces")
    httpx.post(f"{url}/{name}/rl/end_session", json={"score": 0.75}).raise_for_status()
    form.get_by_label("Name (optional)").fill("")
    expect(form).to_contain_text("The score of the session stays 0.75")


def test_a_reward_that_another_person_set_meanwhile_is_not_replaced_unseen(url: str, opened: Opened) -> None:
    name = "rewards/race"
    body = {"model": "m", "messages": [{"role": "user", "content": "Say exactly: one"}]}
    httpx.post(f"{url}/{name}/v1/chat/completions", json=body).raise_for_status()
    page = opened(url)
    page.route("**/rl/events", lambda route: route.abort())
    opened.watched.allow("ERR_FAILED")
    page.goto(url + session(name, "?turn=0"))
    expect(page.get_by_role("button", name="Reward turn 0")).to_be_visible()
    page.keyboard.press("r")
    page.get_by_label("Reward of turn 0", exact=True).fill("1")
    page.get_by_label("Name (optional)").fill("")
    httpx.post(f"{url}/{name}/rl/set_reward", json={"reward": -1}).raise_for_status()
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("Meanwhile it was set to \N{MINUS SIGN}1.")
    assert httpx.get(f"{url}/rl/sessions/{name}").json()["interactions"][0]["reward"] == -1
    page.get_by_role("button", name="Replace").click()
    expect(page.get_by_text("Reward 1 set.")).to_be_visible()


def test_a_reader_is_told_why_a_reward_is_refused_and_stays_logged_in(tmp_path: Path, opened: Opened) -> None:
    keys = {"admin_key": servers.ADMIN_KEY, "reader_key": "the-reader-key-of-these-tests"}
    admin = {"authorization": f"Bearer {servers.ADMIN_KEY}"}
    with servers.serving(default_url(tmp_path), **keys) as url:
        httpx.post(f"{url}/rl/start_session", json={"session_id": "s"}, headers=admin).raise_for_status()
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        httpx.post(f"{url}/s/v1/chat/completions", json=body, headers=admin).raise_for_status()
        page = opened(url)
        opened.watched.allow("401|403")
        page.evaluate("key => sessionStorage.setItem('tokengrove-admin-key', key)", keys["reader_key"])
        page.goto(url + session("s"))
        page.reload()
        expect(page.get_by_role("button", name="Reward the session")).to_be_visible()
        page.keyboard.press("r")
        page.get_by_label("Reward of the session", exact=True).fill("1")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("a reader's key (--reader-key), which changes nothing")
        expect(page.get_by_label("Reward of the session", exact=True)).to_have_value("1")
        page.context.close()
