"""A server with an admin key asks for it; the key stays in the tab, and the page says what is wrong with another."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.servers import ADMIN_KEY, Restarted

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

REFUSED = "the server responded with a status of 40[13]"
"""Chromium writes each refused request to the console."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarted]:
    running = Restarted(tmp_path, admin_key=ADMIN_KEY)
    body = {"session_id": "secret/session"}
    httpx.post(f"{running.url}/rl/start_session", json=body, headers={"x-api-key": ADMIN_KEY}).raise_for_status()
    yield running
    running.stop()


def opened_login(opened: Opened, address: str) -> Page:
    """Open an address of a server that wants a key."""
    page = opened(address)
    opened.watched.allow(REFUSED)
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    return page


def log_in(page: Page, key: str) -> None:
    page.get_by_label("Admin key").fill(key)
    page.get_by_role("button", name="Log in").click()


def test_nothing_is_shown_before_the_login(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/session/secret/session")
    assert "secret/session" not in page.locator("main").inner_text()


def test_the_key_opens_the_view_that_the_address_names(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    log_in(page, ADMIN_KEY)
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()
    page.reload()
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()


def test_a_wrong_key_is_refused_in_words_and_another_may_be_given(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    log_in(page, "wrong" * 5)
    expect(page.get_by_role("alert")).to_contain_text("not the admin key")
    expect(page.get_by_label("Admin key")).to_be_focused()
    log_in(page, ADMIN_KEY)
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()


def test_the_key_of_a_session_does_not_open_the_page(server: Restarted, opened: Opened) -> None:
    headers = {"x-api-key": ADMIN_KEY}
    started = httpx.post(f"{server.url}/rl/start_session", json={"task_id": "t"}, headers=headers).json()
    for name in ("api_key", "control_key"):
        page = opened_login(opened, f"{server.url}/#/sessions")
        log_in(page, started[name])
        expect(page.get_by_role("alert")).to_contain_text("not the admin key")


def test_a_readers_key_opens_the_page_and_is_kept_when_a_change_is_refused(server: Restarted, opened: Opened) -> None:
    server.stop()
    server.start(admin_key=ADMIN_KEY, reader_key="reader" + ADMIN_KEY)
    page = opened_login(opened, f"{server.url}/#/sessions")
    opened.watched.allow("403")
    log_in(page, "reader" + ADMIN_KEY)
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()
    said = page.evaluate("""async () => {
      const { post } = await import(document.querySelector('link[href$="lib/api.js"]').href);
      return post("rl/start_session", {}).catch((error) => error.message);
    }""")
    assert "reader's key" in said
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()


def test_the_key_stays_in_the_tab_and_out_of_addresses_and_cookies(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    log_in(page, ADMIN_KEY)
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()
    assert asked and not any(ADMIN_KEY in address for address in (*asked, page.url))
    assert page.context.cookies() == []
    assert ADMIN_KEY not in page.evaluate("JSON.stringify(localStorage)")
    another = page.context.new_page()
    another.goto(f"{server.url}/#/sessions")
    expect(another.get_by_role("heading", name="Log in")).to_be_visible()


def test_after_the_key_was_changed_the_page_says_so_and_takes_the_new_one(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    opened.watched.allow("ERR_CONNECTION_REFUSED|ERR_INCOMPLETE_CHUNKED|ERR_EMPTY_RESPONSE|ERR_CONNECTION_RESET")
    log_in(page, ADMIN_KEY)
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()
    server.stop()
    server.start(admin_key="another" + ADMIN_KEY)
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    expect(page.get_by_role("alert")).to_contain_text("replaced")
    log_in(page, "another" + ADMIN_KEY)
    page.get_by_role("link", name="Sessions").click()
    expect(page.get_by_role("link", name="secret/session").first).to_be_visible()


def test_the_browser_checks_no_spelling_of_the_key(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    expect(page.get_by_label("Admin key")).to_have_js_property("spellcheck", False)


def test_log_out_forgets_the_key(server: Restarted, opened: Opened) -> None:
    page = opened_login(opened, f"{server.url}/#/sessions")
    log_in(page, ADMIN_KEY)
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()
    assert ADMIN_KEY not in page.evaluate("JSON.stringify([sessionStorage, localStorage])")
    page.reload()
    expect(page.get_by_role("heading", name="Log in")).to_be_visible()


def test_an_open_server_asks_for_no_key(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    expect(page.get_by_role("link", name="forks/every-reason").first).to_be_visible()
    expect(page.get_by_role("button", name="Log out")).to_have_count(0)
