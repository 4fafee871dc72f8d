"""The built site: what leads where, what it loads, and that its reference has what the documents import.

`TOKENGROVE_TEST_SITE` is the folder that `python -m supply.site` wrote; without it, these tests are skipped.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.docs.pages import blocks_of, pages

SITE = Path(os.environ.get("TOKENGROVE_TEST_SITE", "nowhere"))
pytestmark = pytest.mark.skipif(not SITE.is_dir(), reason="TOKENGROVE_TEST_SITE names no folder with the built site")


@dataclass
class Html(HTMLParser):
    """What an HTML page has. `links`: of `a`; `loaded`: what a browser loads with the page."""

    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    navigation: list[str] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._in_navigation = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "nav":
            self._in_navigation += 1
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
            if self._in_navigation:
                self.navigation.append(given["href"])
        elif tag in ("img", "script", "source", "iframe"):
            self.loaded += [given[name] for name in ("src", "srcset") if name in given]
        elif tag == "link" and given.get("rel") != "canonical":
            self.loaded.append(given["href"])

    def handle_endtag(self, tag: str) -> None:
        self._in_navigation -= tag == "nav"

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture(scope="module")
def html() -> dict[Path, Html]:
    """Every page of the site by its file."""
    found = {}
    for path in SITE.resolve().rglob("*.html"):
        found[path] = Html()
        found[path].feed(path.read_text(encoding="utf-8"))
    return found


def target(page: Path, link: str) -> tuple[Path, str]:
    """The file and the anchor that a link leads to."""
    parts = urlsplit(link)
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


def test_every_link_and_picture_leads_to_a_file_and_an_anchor_of_the_site(html: dict[Path, Html]) -> None:
    broken = []
    for page, found in html.items():
        if page.name == "404.html":  # shown at any path, so its links are absolute
            continue
        for link in found.links + found.loaded:
            if urlsplit(link).scheme:
                continue
            path, anchor = target(page, link)
            if not path.is_file() or (anchor and path in html and anchor not in html[path].ids):
                broken.append(f"{page.relative_to(SITE.resolve())}: {link}")
    assert len(html) > 60 and broken == []


def test_every_page_is_in_the_navigation(html: dict[Path, Html]) -> None:
    home = SITE.resolve() / "index.html"
    reached = {target(home, link)[0] for link in html[home].navigation if not urlsplit(link).scheme}
    assert [str(page) for page in html if page not in reached and page.name != "404.html"] == []


def test_a_page_loads_nothing_from_another_host_and_has_no_comment(html: dict[Path, Html]) -> None:
    foreign = {link for found in html.values() for link in found.loaded if urlsplit(link).netloc}
    assert (foreign, [found.comments for found in html.values() if found.comments]) == (set(), [])


def test_the_search_finds_set_reward_in_the_reference_and_in_the_documents() -> None:
    items = json.loads((SITE / "search.json").read_text(encoding="utf-8"))["items"]
    found = {item["location"] for item in items if "set_reward" in item["title"] + item["text"]}
    assert "api/tokengrove/#tokengrove.Session.set_reward" in found
    assert any(location.startswith("docs/http-api/#") for location in found)


def test_the_reference_has_every_name_that_the_documents_import_from_tokengrove(html: dict[Path, Html]) -> None:
    reference = {page.parent.name: found for page, found in html.items() if page.parent.parent.name == "api"}
    there = {*reference, *(anchor for found in reference.values() for anchor in found.ids)}
    imported = {name for page in pages() for block in blocks_of(page) for name in imports(block.text, block.language)}
    assert len(imported) > 40
    assert sorted(name for name in imported if name not in there) == []


def imports(text: str, language: str) -> Iterator[str]:
    """The names that a block of Python imports from `tokengrove`, with their modules; of bash, those in `python -c`."""
    if language == "python":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tokengrove":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
    else:
        for module, name in re.findall(r"from (tokengrove[\w.]*) import (\w+)", text):
            yield f"{module}.{name}"
