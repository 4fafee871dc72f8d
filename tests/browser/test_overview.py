"""The overview: what the server does now and did in the last hour, live, as charts or tables."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.servers import Restarted
from tests.support import user

if TYPE_CHECKING:
    from tests.browser.conftest import Opened


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarted]:
    running = Restarted(tmp_path)
    yield running
    running.stop()


def chat(server: Restarted, session: str, text: str = "hi") -> None:
    body = {"model": "m", "max_tokens": 8, "messages": [user(text)]}
    httpx.post(f"{server.url}/{session}/v1/chat/completions", json=body).raise_for_status()


def test_numbers_forks_and_failures_appear_while_one_looks(server: Restarted, opened: Opened) -> None:
    page = opened(f"{server.url}/#/overview")
    expect(page.locator(".overview-tile", has_text="Turns / s")).to_contain_text("0 in all")
    expect(page.get_by_role("region", name="Forks")).to_contain_text("No fork")
    chat(server, "a")
    said = [user("hi"), {"role": "assistant", "content": "an answer of somebody else"}, user("and then?")]
    httpx.post(f"{server.url}/a/v1/chat/completions", json={"model": "m", "max_tokens": 8, "messages": said})
    assert httpx.post(f"{server.url}/a/v1/chat/completions", json={"messages": []}).status_code == 400
    expect(page.locator(".overview-tile", has_text="Turns / s")).to_contain_text("2 in all")
    expect(page.get_by_role("region", name="Forks").get_by_role("row", name="rewritten 1")).to_be_visible()
    expect(page.get_by_role("region", name="Failures").get_by_role("row", name="invalid_request 1")).to_be_visible()


def test_rewards_are_drawn_by_weights_and_every_chart_can_be_read(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/overview")
    chart = page.get_by_role("region", name="Mean reward by weights")
    expect(chart.locator("canvas")).to_be_visible()
    expect(chart.get_by_role("img")).to_have_attribute("aria-label", re.compile(r"mean: now .*highest"))
    page.get_by_role("button", name="Tables").click()
    expect(page).to_have_url(re.compile("as=tables"))
    expect(chart.get_by_role("columnheader", name="version")).to_be_visible()
    assert chart.get_by_role("row").count() > 4
    expect(page.locator("canvas")).to_have_count(0)


def test_the_span_is_in_the_address_and_the_buttons_say_it(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/overview?span=5m")
    expect(page.get_by_role("button", name="5 min", exact=True)).to_have_attribute("aria-pressed", "true")
    page.get_by_role("button", name="15 min").click()
    expect(page).to_have_url(re.compile("span=15m"))
    expect(page.get_by_role("button", name="5 min", exact=True)).to_have_attribute("aria-pressed", "false")


def test_an_engine_server_shows_what_its_cache_saves_and_why_it_does_not_answer(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    opened.watched.allow("net::ERR_FAILED")
    counts = {"in_flight": 0, "served": 5, "session_count": 0, "version": 0}
    gone = {"url": "http://e:1", "state": "ejected", **counts, "failure": "it refused the connection"}
    busy = {"url": "http://e:2", "state": "alive", **counts, "failure": None}
    servers = [
        {**gone, "prompt_tokens": 0, "cached_tokens": 0},
        {**busy, "prompt_tokens": 400, "cached_tokens": 300},
        {"url": "http://e:3", "state": "missing", "failure": "no answer"},
    ]
    said = {**httpx.get(f"{url}/rl/statistics").json(), "servers": servers}
    page.route("**/rl/events", lambda route: route.abort())
    page.route("**/rl/statistics", lambda route: route.fulfill(json=said))
    page.reload()  # the stream that is open already would go on to tell the server's own figures
    page.get_by_role("link", name="Overview").click()
    row = page.get_by_role("region", name="Engine").get_by_role("row", name="http://e:1")
    expect(row).to_contain_text("ejected")
    expect(row.get_by_text("it refused the connection")).to_be_visible()
    cells = page.get_by_role("region", name="Engine").get_by_role("row")
    expect(cells.filter(has_text="http://e:2").get_by_role("cell")).to_have_text([re.compile("alive"), "0", "75%", "0"])
    for other in ("http://e:1", "http://e:3"):
        expect(cells.filter(has_text=other).get_by_role("cell").nth(2)).to_have_text("\u2013")


def test_after_a_restart_the_numbers_are_those_of_the_new_server(server: Restarted, opened: Opened) -> None:
    page = opened(f"{server.url}/#/overview")
    opened.watched.allow("net::ERR_")
    chat(server, "a")
    expect(page.locator(".overview-tile", has_text="Turns / s")).to_contain_text("1 in all")
    server.stop()
    expect(page.locator("header .live")).to_contain_text("reconnecting")
    server.start()
    expect(page.locator("header .live")).to_have_text("live")
    expect(page.locator(".overview-tile", has_text="Turns / s")).to_contain_text("0 in all")


def test_all_views_of_a_tab_share_one_connection_which_ends_when_it_is_hidden(
    server: Restarted, opened: Opened
) -> None:
    page = opened(f"{server.url}/#/sessions")
    expect(page.locator("header .live")).to_have_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/rl/events" in request.url else None)
    page.reload()
    expect(page.locator("header .live")).to_have_text("live")
    page.get_by_role("link", name="Overview").click()
    expect(page.locator(".overview-tile")).to_have_count(9)
    page.get_by_role("link", name="Sessions").click()
    expect(page.locator(".overview-tile")).to_have_count(0)
    expect(page.locator("header .live")).to_have_text("live")
    assert len(asked) == 1
    with page.expect_event("requestfailed", lambda request: "/rl/events" in request.url):
        hide(page, "hidden")
    expect(page.locator("header .live")).to_have_text("")
    with page.expect_request("**/rl/events"):
        hide(page, "visible")
    expect(page.locator("header .live")).to_have_text("live")


def hide(page: Page, state: str) -> None:
    """What a browser does when another tab comes to the front."""
    page.evaluate(
        """(state) => {
            Object.defineProperty(document, "visibilityState", { value: state, configurable: true });
            document.dispatchEvent(new Event("visibilitychange"));
        }""",
        state,
    )
