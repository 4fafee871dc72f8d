"""The list finds sessions by the texts of their turns, if the server indexes them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from playwright.sync_api import expect

from tests.browser.servers import Restarted
from tests.browser.views import wait

if TYPE_CHECKING:
    from tests.browser.conftest import Open


def say(url: str, session: str, text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    answer = httpx.post(f"{url}/{session}/v1/chat/completions", json=body).raise_for_status()
    name: str = answer.json()["id"]
    return name


def test_a_text_finds_its_session_as_soon_as_it_is_indexed_and_leads_to_the_turn(tmp_path: Path, opened: Open) -> None:
    server = Restarted(tmp_path, search=True)
    try:
        say(server.url, "other", "a haystack")
        page = opened(f"{server.url}/#/sessions")
        wait(page)
        page.get_by_label("Text").fill('"two needles"')
        expect(page.get_by_text("No session matches")).to_be_visible()
        expect(page).to_have_url(re.compile(r"#/sessions\?text="))
        turn = say(server.url, "sewing", "<b>take</b> two   Needles\u202eand thread")
        found = page.locator(".sessions-found")
        expect(found).to_have_count(1)
        expect(found.locator("mark")).to_have_text("two Needles")
        expect(found).to_contain_text("<b>take</b>")
        expect(found).to_contain_text("⟨RLO⟩")
        page.get_by_label("Text").press("End")  # the field kept the focus
        found.click()
        expect(page).to_have_url(re.compile(rf"#/session/sewing\?turn={re.escape(turn)}$"))
        expect(page.get_by_role("heading", level=1)).to_contain_text("sewing")
    finally:
        server.stop()


def test_a_server_without_an_index_has_no_field_and_says_what_is_missing(tmp_path: Path, opened: Open) -> None:
    server = Restarted(tmp_path)
    try:
        say(server.url, "s", "needle")
        page = opened(f"{server.url}/#/sessions")
        expect(page.locator("tbody a[data-focus]")).to_have_text("s")
        expect(page.get_by_label("Text")).to_have_count(0)
        opened.watched.allow("400")
        page.goto(f"{server.url}/#/sessions?text=needle")
        expect(page.get_by_text(re.compile("needs a server with --search"))).to_be_visible()
    finally:
        server.stop()
