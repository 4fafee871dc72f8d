"""Training runs beside each other, in Chromium: charts by step, the choice of runs, and saved numbers."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from tests.browser.views import wait
from tokengrove import Client

if TYPE_CHECKING:
    from tests.browser.conftest import Opened

RUN = "sums"


def runs(opened: Opened, url: str, rest: str = "") -> Page:
    page = opened(f"{url}/#/runs?run=project{rest}")
    wait(page)
    expect(page.get_by_role("status").filter(has_text=re.compile(r"^\d+ runs?$"))).to_be_visible()
    return page


def test_figures_by_step_are_those_of_the_client(url: str, opened: Opened) -> None:
    with Client(url) as client:
        known = [each for each in client.runs(run="project") if each["run"] == RUN]
    page = runs(opened, url, "&runs=sums&as=tables")
    table = page.get_by_role("group", name="Mean reward, as a table")
    rows = table.locator("tbody tr")
    expect(rows).to_have_count(len(known))
    shown = {row.locator("th").inner_text(): float(row.locator("td").inner_text()) for row in rows.all()}
    assert shown == pytest.approx({f"step {each['step']}": each["mean_score"] for each in known}, abs=0.001)
    worst = page.get_by_role("region", name=f"Lowest rewards of {RUN}").locator("tbody tr")
    expect(worst).to_have_count(len(known[-1]["worst"]))
    worst.first.get_by_role("link").click()
    expect(page).to_have_url(re.compile("#/session/"))


def test_the_numbers_of_a_chart_can_be_saved(url: str, opened: Opened, tmp_path: Path) -> None:
    page = runs(opened, url, "&runs=sums")
    with page.expect_download() as saved:
        page.get_by_role("region", name="Mean reward").get_by_role("button", name="CSV").click()
    assert saved.value.suggested_filename == "Mean_reward.csv"
    saved.value.save_as(tmp_path / "saved.csv")
    head, *rows = csv.reader((tmp_path / "saved.csv").read_text().splitlines())
    assert head == ["step", RUN]
    with Client(url) as client:
        known = [each for each in client.runs(run="project") if each["run"] == RUN]
    assert [(int(step), float(value)) for step, value in rows] == [(each["step"], each["mean_score"]) for each in known]


def test_runs_are_chosen_by_their_boxes_and_stand_in_the_address(url: str, opened: Opened) -> None:
    page = runs(opened, url)
    boxes = page.get_by_role("group", name="Runs that are shown").get_by_role("checkbox")
    shown = page.locator("main canvas").count()
    assert shown > 3
    checked = [box for box in boxes.all() if box.is_checked()]
    assert 1 <= len(checked) <= 2
    box = page.get_by_role("checkbox", name=RUN)
    box.set_checked(not box.is_checked())
    expect(page).to_have_url(re.compile("runs="))


def test_another_key_of_metadata_names_the_runs(url: str, opened: Opened) -> None:
    page = runs(opened, url)
    page.get_by_label("Run", exact=True).fill("nothing-has-this-key")
    page.get_by_label("Run", exact=True).blur()
    expect(page.get_by_role("checkbox", name="unnamed")).to_be_visible()
