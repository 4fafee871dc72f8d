"""The frame: themes, navigation, titles, focus, long lists by keyboard, and a gateway that adds a prefix."""

from __future__ import annotations

import contextlib
import http.server
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.browser.servers import ADMIN_KEY, Restarted
from tests.browser.test_accessibility import _RUN as RUN
from tests.browser.test_accessibility import found

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from tests.browser.conftest import Opened

_GROUND = "getComputedStyle(document.documentElement).backgroundColor"


_LEADS_ON_UNHEARD = """
const add = window.addEventListener;
window.addEventListener = function (type, ...rest) {
  if (type === "hashchange") history.replaceState(null, "", "#/groups");  // which fires no event
  return add.call(this, type, ...rest);
};
"""


def test_an_address_that_changes_while_the_page_is_first_drawn_is_followed(browser: Browser, url: str) -> None:
    page = browser.new_page()
    page.add_init_script(_LEADS_ON_UNHEARD)
    page.goto(f"{url}/#/sessions")
    expect(page.get_by_role("heading", level=1)).to_have_text("Groups")
    page.close()


def test_the_theme_is_the_systems_until_the_reader_chooses_and_then_stays(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions", color_scheme="light")
    light = page.evaluate(_GROUND)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(_GROUND)
    assert light != dark
    page.get_by_role("radio", name="Light theme").check(force=True)
    assert page.evaluate(_GROUND) == light
    page.reload()
    expect(page.get_by_role("radio", name="Light theme")).to_be_checked()
    assert page.evaluate(_GROUND) == light
    page.get_by_role("radio", name="Light theme").press("ArrowRight")
    expect(page.get_by_role("radio", name="Dark theme")).to_be_checked()
    assert page.evaluate(_GROUND) == dark
    page.get_by_role("radio", name="Theme of the system").check(force=True)
    page.emulate_media(color_scheme="light")
    assert page.evaluate(_GROUND) == light
    assert page.evaluate("localStorage.length") == 0


def test_navigation_moves_the_focus_to_the_heading_and_names_the_window(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/sessions")
    expect(page).to_have_title("Sessions · Tokengrove")
    for name in ("Groups", "Overview"):
        link = page.get_by_role("navigation").get_by_role("link", name=name)
        link.focus()
        link.press("Enter")
        expect(page.get_by_role("heading", level=1)).to_be_focused()
        expect(page).to_have_title(f"{name} · Tokengrove")
        expect(link).to_have_attribute("aria-current", "page")
    page.go_back()
    expect(page).to_have_title("Groups · Tokengrove")
    expect(page.get_by_role("heading", level=1)).to_be_focused()


def test_the_first_tab_stop_skips_the_navigation(url: str, opened: Opened) -> None:
    page = opened(f"{url}/#/overview")
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="Skip to the content")
    expect(skip).to_be_focused()
    expect(skip).to_be_in_viewport()
    skip.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    assert page.url.endswith("#/overview")


@pytest.mark.parametrize("address", ["#/no-such-view", "#/constructor", "#/%E0%A4%A"])
def test_an_address_that_is_no_view_says_so(url: str, opened: Opened, address: str) -> None:
    page = opened(f"{url}/{address}")
    expect(page.get_by_role("heading", name="There is no such view")).to_be_visible()
    page.get_by_role("link", name="All sessions").click()
    expect(page).to_have_title("Sessions · Tokengrove")


def test_a_long_list_is_walked_with_the_keys_and_draws_few_rows(many_url: str, opened: Opened) -> None:
    page = opened(f"{many_url}/#/sessions")
    rows = page.locator("tbody tr[data-row]")
    expect(rows.first).to_be_visible()
    first = page.locator('[data-row="0"] [data-focus]')
    first.focus()
    first.press("ArrowDown")
    expect(page.locator('[data-row="1"] [data-focus]')).to_be_focused()
    for _ in range(3):
        page.keyboard.press("PageDown")
    focused = int(page.evaluate("document.activeElement.closest('[data-row]').dataset.row"))
    assert focused > 20
    expect(page.locator(f'[data-row="{focused}"]')).to_be_in_viewport()
    assert rows.count() < 80
    page.keyboard.press("Home")
    expect(first).to_be_focused()


def test_the_page_works_below_a_prefix_of_a_gateway(url: str, opened: Opened) -> None:
    with _Gateway(url) as address:
        page = opened(f"{address}/deep/grove/#/sessions")
        expect(page.get_by_role("link", name="forks/every-reason").first).to_be_visible()
        page.goto(f"{address}/deep/grove/ui/#/groups")
        expect(page).to_have_title("Groups · Tokengrove")
        assert page.url == f"{address}/deep/grove/ui#/groups"
        page.close()  # it may still load other views, which the gateway must answer


def test_the_login_and_an_unknown_address_have_no_violation_in_both_themes(
    tmp_path: Path, opened: Opened, axe: str
) -> None:
    server = Restarted(tmp_path, admin_key=ADMIN_KEY)
    for address, heading in (("#/sessions", "Log in"), ("#/nothing", "There is no such view")):
        for scheme in ("light", "dark"):
            page = opened(f"{server.url}/{address}", color_scheme=scheme)
            opened.watched.allow("401")
            expect(page.get_by_role("heading", name=heading)).to_be_visible()
            page.evaluate(axe)
            assert found(page.evaluate(RUN)) == []
    server.stop()


class _Gateway:
    """A gateway that serves another server below `/deep/grove`."""

    def __init__(self, url: str) -> None:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = urllib.request.Request(url + self.path.removeprefix("/deep/grove"))
                for name in ("accept", "if-none-match"):
                    if name in self.headers:
                        asked.add_header(name, self.headers[name])
                try:
                    with _OPENER.open(asked, timeout=20) as answer:
                        self._pass_on(answer)
                except urllib.error.HTTPError as answer:
                    self._pass_on(answer)

            def _pass_on(self, answer: Any) -> None:
                self.send_response(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection", "date", "server"):
                        self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(ConnectionError):  # the browser left
                    while part := answer.read1(65536):
                        self.wfile.write(part)

            def log_message(self, *_: object) -> None:
                pass

        self._server = _Listening(("127.0.0.1", 0), Handler)

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Listening(http.server.ThreadingHTTPServer):
    request_queue_size = 128


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)
