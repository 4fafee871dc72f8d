"""The page says whether it is live: it connects again after a restart, and says clearly that a server is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import Page, expect

from tests.browser.servers import Restarted

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

GONE = "net::ERR_"
"""Chromium writes each request that got no answer to the console."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Restarted]:
    running = Restarted(tmp_path)
    yield running
    running.stop()


def start_session(server: Restarted, name: str) -> None:
    httpx.post(f"{server.url}/rl/start_session", json={"session_id": name}).raise_for_status()


def live_page(server: Restarted, opened: Opened) -> Page:
    page = opened(f"{server.url}/#/sessions")
    opened.watched.allow(GONE)
    expect(page.locator("header .live")).to_have_text("live")
    return page


def test_a_new_session_appears_by_itself(server: Restarted, opened: Opened) -> None:
    page = live_page(server, opened)
    start_session(server, "new/session")
    expect(page.get_by_role("link", name="new/session").first).to_be_visible()


def test_the_page_connects_again_after_a_restart_and_shows_what_it_missed(server: Restarted, opened: Opened) -> None:
    page = live_page(server, opened)
    server.stop()
    expect(page.locator("header .live")).to_contain_text("reconnecting")
    server.start()
    start_session(server, "after/restart")
    expect(page.locator("header .live")).to_have_text("live")
    expect(page.get_by_role("link", name="after/restart").first).to_be_visible()


def test_a_view_of_a_server_that_is_gone_says_so_and_goes_on_when_it_is_back(server: Restarted, opened: Opened) -> None:
    page = live_page(server, opened)
    server.stop()
    page.get_by_role("link", name="Groups").click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    server.start()
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_an_overview_shown_while_the_server_is_gone_fills_by_itself(server: Restarted, opened: Opened) -> None:
    page = live_page(server, opened)
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("region", name="Claim backlog")).to_be_visible()
    page.get_by_role("link", name="Sessions").click()
    server.stop()
    page.get_by_role("link", name="Overview").click()
    expect(page.get_by_role("alert")).to_contain_text("cannot be reached")
    server.start()
    expect(page.get_by_role("region", name="Claim backlog")).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_a_session_that_is_not_there_is_told_of(server: Restarted, opened: Opened) -> None:
    page = opened(f"{server.url}/#/session/no/such")
    opened.watched.allow("status of 404")
    expect(page.get_by_role("alert")).to_contain_text("no/such")
