"""Links between documents, and the paths that they name, lead somewhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, pages

LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
PATH = re.compile(r"`((?:proxy|tests|docs|examples|migrations|docker)/[\w./-]*|\.ci/run)`")


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [path for path in pages() if path.is_file()], ids=lambda path: path.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http://", "https://")):
            continue
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(path), (
            f"{page.name} links to {target}#{anchor}, which has no such heading"
        )


@pytest.mark.parametrize("page", [path for path in pages() if path.is_file()], ids=lambda path: path.name)
def test_every_path_in_the_repository_that_is_named_is_there(page: Path) -> None:
    for path in PATH.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), f"{page.name} names {path}"


def test_the_index_names_every_page_and_every_extra() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    linked = {target for target, _ in LINK.findall(index)}
    missing = [path.name for path in (ROOT / "docs").glob("*.md") if path.name not in {*linked, "index.md"}]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = {name for row in re.findall(r"^\| (`.*?) \|", index, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert (missing, extras.keys() ^ rows) == ([], set())
