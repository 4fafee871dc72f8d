"""The list finds sessions by the texts of their turns, if the server indexes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from playwright.sync_api import expect

from tests.browser import servers
from tests.browser.views import wait
from tests.support import default_url

if TYPE_CHECKING:
    from tests.browser.conftest import Opened


def say(url: str, session: str, text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = httpx.post(f"{url}/{session}/v1/chat/completions", json=body).raise_for_status()
    name: str = answer.json()["id"]
    return name


@pytest.fixture
def searching(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that indexes texts. It outlives the page, which loads its views one after another."""
    with servers.serving(default_url(tmp_path), search=True) as address:
        yield address


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[str]:
    """The URL of a server that indexes none."""
    with servers.serving(default_url(tmp_path)) as address:
        yield address


def test_a_text_finds_its_session_as_soon_as_it_is_indexed_and_leads_to_the_turn(
    searching: str, opened: Opened
) -> None:
    say(searching, "other", "a haystack")
    page = opened(f"{searching}/#/sessions")
    wait(page)
    page.get_by_label("Text").fill('"two needles"')
    expect(page.get_by_text("No session matches")).to_be_visible()
    expect(page).to_have_url(re.compile(r"#/sessions\?text="))
    turn = say(searching, "sewing", "<b>take</b> two   Needles\u202eand thread")
    found = page.locator(".sessions-found")
    expect(found).to_have_count(1)
    expect(found.locator("mark")).to_have_text("two Needles")
    expect(found).to_contain_text("<b>take</b>")
    expect(found).to_contain_text("⟨RLO⟩")
    expect(page.get_by_label("Text")).to_be_focused()
    found.click()
    expect(page).to_have_url(re.compile(rf"#/session/sewing\?turn={re.escape(turn)}$"))
    expect(page.get_by_role("heading", level=1)).to_contain_text("sewing")


def test_a_server_without_an_index_has_no_field_and_says_what_is_missing(plain: str, opened: Opened) -> None:
    say(plain, "s", "needle")
    page = opened(f"{plain}/#/sessions")
    expect(page.locator("tbody a[data-focus]")).to_have_text("s")
    expect(page.get_by_label("Text")).to_have_count(0)
    opened.watched.allow("400")
    page.goto(f"{plain}/#/sessions?text=needle")
    expect(page.get_by_text(re.compile("needs a server with --search"))).to_be_visible()
