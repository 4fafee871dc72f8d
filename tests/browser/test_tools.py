"""The machine has what the tests of the page need, in the versions that they were written for."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from tests.browser import tools

REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def test_playwright_is_installed_in_its_exact_version() -> None:
    (wanted,) = (line for line in REQUIREMENTS.read_text().splitlines() if line.startswith("playwright=="))
    if importlib.util.find_spec("playwright") is None:
        tools.missing(f"playwright is not installed: pip install -r {REQUIREMENTS.parent.name}/{REQUIREMENTS.name}")
    assert f"playwright=={importlib.metadata.version('playwright')}" == wanted


def test_no_plug_in_replaces_the_fixtures() -> None:
    assert importlib.util.find_spec("pytest_playwright") is None


def test_a_browser_is_installed() -> None:
    assert tools.chromium()
