"""Screen readers, keyboards and small screens: axe-core finds nothing on any view, and nothing needs a mouse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from tests.browser.views import VIEWS, show

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

_RUN = "async () => (await axe.run(document, {resultTypes: ['violations']})).violations"


def found(violations: list[dict[str, Any]]) -> list[str]:
    """The violations of axe-core, a line for each rule with the first elements that break it."""
    return [f"{each['id']}: {each['help']}: {'; '.join(map(_node, each['nodes'][:3]))}" for each in violations]


def _node(node: dict[str, Any]) -> str:
    return f"{node['target']} {node['html'][:160]} {node.get('failureSummary', '')[:200]}"


@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_no_violation_in_both_themes(url: str, opened: Opened, axe: str, view: str) -> None:
    page = show(opened, url, VIEWS[view], color_scheme="light")
    page.evaluate(axe)
    assert "\n".join(found(page.evaluate(_RUN))) == ""
    page.emulate_media(color_scheme="dark")
    assert "\n".join(found(page.evaluate(_RUN))) == ""


def test_axe_finds_no_violation_in_the_form_of_a_reward(url: str, opened: Opened, axe: str) -> None:
    page = show(opened, url, VIEWS["conversation"])
    page.keyboard.press("r")
    expect(page.get_by_role("form", name="Reward the session")).to_be_visible()
    page.evaluate(axe)
    assert "\n".join(found(page.evaluate(_RUN))) == ""
