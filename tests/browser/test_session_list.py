"""The list of sessions: filters in the address, thousands of rows, live changes, failures that say how to go on."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from uuid import uuid4

import httpx
from playwright.sync_api import expect

from tests.browser.conftest import MANY
from tests.browser.views import wait

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.browser.conftest import Open


def post(url: str, path: str, **body: object) -> None:
    httpx.post(f"{url}{path}", json=body).raise_for_status()


def ask(url: str, session: str) -> None:
    """One turn of a session."""
    post(url, f"/{session}/v1/chat/completions", model="m", messages=[{"role": "user", "content": "hi"}], max_tokens=8)


def row(page: Page, name: str) -> Locator:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def names(page: Page) -> list[str]:
    return page.locator("tbody tr[data-row] td:first-child a").all_inner_texts()


def test_filters_narrow_the_list_and_stand_in_the_address(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions")
    wait(page)
    page.get_by_label("Search").fill("forks/")
    expect(page.get_by_role("link", name="marks/spans")).to_have_count(0)
    expect(row(page, "forks/every-reason")).to_be_visible()
    assert all(name.startswith("forks/") for name in names(page))
    expect(page).to_have_url(re.compile(r"#/sessions\?search=forks%2F$"))
    page.get_by_label("Forks").select_option("without")
    expect(row(page, "forks/every-reason")).to_have_count(0)
    page.get_by_label("Forks").select_option("with")
    expect(row(page, "forks/every-reason")).to_be_visible()
    page.reload()
    expect(row(page, "forks/every-reason")).to_be_visible()
    expect(page.get_by_label("Search")).to_have_value("forks/")
    page.get_by_role("button", name="Clear 2 filters").click()
    expect(page.get_by_label("Search")).to_have_value("")
    expect(row(page, "failures/all")).to_be_visible()


def test_a_status_shows_its_number_and_its_sessions(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions")
    wait(page)
    expired = page.get_by_role("group", name="Status").get_by_role("button", name="expired")
    counted = httpx.get(f"{url}/rl/sessions", params={"include": "counts", "limit": 1}).json()["counts"]["expired"]
    expect(expired).to_contain_text(str(counted))
    expired.click()
    expect(expired).to_have_attribute("aria-pressed", "true")
    expect(page.locator("tbody tr[data-row]")).to_have_count(counted)
    expect(page.locator("tbody tr[data-row]").first).to_contain_text("expired")


def test_rewards_purposes_versions_and_groups_select(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions?group=sum-2&reward_min=0.5&reward_max=0.8")
    expect(page.locator("tbody tr[data-row]")).to_have_count(2)
    assert sorted(names(page)) == ["sum-2-2", "sum-2-3"]
    page.get_by_label("Reward, least").fill("0.7")
    expect(page.locator("tbody tr[data-row]")).to_have_count(1)
    page.goto(f"{url}/#/sessions?purpose=subagent")
    expect(page.locator("tbody tr[data-row]")).to_have_count(len(_ids(url, '{"purpose": "subagent"}')))
    page.goto(f"{url}/#/sessions?version_max=0")
    expect(page.locator("tbody tr[data-row]")).to_have_count(len(_ids(url, '{"version": {"max": 0}}')))


def test_filters_that_are_typed_at_once_all_take_effect(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions")
    wait(page)
    fields = [page.get_by_label(name) for name in ("Reward, least", "Reward, greatest")]
    page.evaluate(
        """(fields) => fields.forEach(([field, text]) => {
            field.value = text;
            field.dispatchEvent(new Event("input", { bubbles: true }));
        })""",
        [[fields[0].element_handle(), "0.2"], [fields[1].element_handle(), "0.9"]],
    )
    expect(page).to_have_url(re.compile(r"reward_min=0\.2&reward_max=0\.9$"))
    expect(fields[0]).to_have_value("0.2")
    expect(fields[1]).to_have_value("0.9")


def _ids(url: str, filter: str) -> list[str]:
    answer = httpx.get(f"{url}/rl/sessions", params={"filter": filter}).json()
    assert answer["cursor"] is None and answer["sessions"]
    return [entry["session_id"] for entry in answer["sessions"]]


def test_a_row_says_what_happened_in_its_session(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions?search=failures")
    cells = row(page, "failures/all").get_by_role("cell")
    expect(cells.nth(1)).to_contain_text("Failed")
    expect(cells.nth(5)).to_contain_text("✕ 2")
    expect(cells.nth(5).locator("[title]")).to_have_attribute("title", re.compile("failed"))
    page.goto(f"{url}/#/sessions?search=every-reason")
    forks = row(page, "forks/every-reason").get_by_role("cell").nth(6).locator("[title]")
    expect(forks).to_have_attribute("title", re.compile("system changed"))


def test_the_keys_go_through_the_rows_and_open_one(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions?search=sum-1")
    wait(page)
    page.get_by_role("region", name="Sessions").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    chosen = page.locator("tbody tr[data-row='1'] a").first
    expect(chosen).to_be_focused()
    name = chosen.inner_text()
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile(f"#/session/{name}$"))


def test_ten_thousand_sessions_are_rows_of_which_few_are_drawn(many_url: str, opened: Open) -> None:
    page = opened(f"{many_url}/#/sessions")
    expect(page.get_by_role("table", name="Sessions")).to_have_attribute("aria-rowcount", str(MANY + 1))
    expect(page.get_by_role("link", name=f"many-{MANY - 1:05}")).to_be_visible()
    assert page.locator("tbody tr[data-row]").count() < 80
    table = page.get_by_role("region", name="Sessions")
    for loaded in (500, 1000, 2000):
        table.focus()
        page.keyboard.press("End")
        # The list is as high as what is loaded; the next page was asked for when its end was near.
        page.wait_for_function(
            "([table, rows]) => table.scrollHeight >= rows * 28", arg=[table.element_handle(), loaded]
        )
        assert page.locator("tbody tr[data-row]").count() < 80
    page.get_by_label("Order").select_option("oldest")
    expect(page.get_by_role("link", name="many-00000")).to_be_visible()


def test_a_filter_on_turns_goes_through_all_sessions(many_url: str, opened: Open) -> None:
    page = opened(f"{many_url}/#/sessions?purpose=title")
    expect(page.get_by_role("heading", name="No session matches")).to_be_visible()
    page.get_by_role("link", name="Show all sessions").click()
    expect(page.get_by_role("link", name=f"many-{MANY - 1:05}")).to_be_visible()


def test_the_list_follows_what_happens(url: str, opened: Open) -> None:
    name = f"live-{uuid4().hex[:8]}"
    page = opened(f"{url}/#/sessions?search={name}&status=active")
    expect(page.get_by_role("heading", name="No session matches")).to_be_visible()
    expect(page.get_by_text("live", exact=True)).to_be_visible()
    post(url, "/rl/start_session", session_id=name)
    expect(row(page, name)).to_be_visible()
    expect(row(page, name).get_by_role("cell").nth(4)).to_have_text("0")
    ask(url, name)
    expect(row(page, name).get_by_role("cell").nth(4)).to_have_text("1")
    post(url, f"/{name}/rl/set_reward", reward=0.25)
    expect(row(page, name).get_by_role("cell").nth(9)).to_have_text("0.25")
    post(url, f"/{name}/rl/end_session")
    expect(page.get_by_role("heading", name="No session matches")).to_be_visible()
    page.get_by_role("button", name="ended").click()
    expect(row(page, name)).to_contain_text("ended")
    httpx.request("DELETE", f"{url}/rl/sessions/{name}").raise_for_status()
    expect(row(page, name)).to_have_count(0)


def test_a_failure_says_so_and_can_be_tried_again(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/groups")
    opened.watched.allow("ERR_FAILED")
    page.route("**/rl/sessions?*", lambda route: route.abort())
    page.get_by_role("link", name="Sessions", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("Loading the sessions failed. The server cannot be reached.")
    page.unroute("**/rl/sessions?*")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("tbody tr[data-row]").first).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_filter_that_the_server_refuses_is_named(url: str, opened: Open) -> None:
    page = opened(f"{url}/#/sessions?status=asleep")
    opened.watched.allow("400")
    expect(page.get_by_role("alert")).to_contain_text("'filter.status' must be")
    page.get_by_role("button", name="Clear the filter").click()
    expect(page.locator("tbody tr[data-row]").first).to_be_visible()
