"""The page's own files: each says what it is for, none was left half merged, and none makes markup of a text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

STATIC = Path(__file__).resolve().parents[4] / "proxy" / "page" / "static"
SOURCES = sorted(path for path in STATIC.rglob("*") if path.suffix in (".js", ".css") and "vendor" not in path.parts)
# What would put a text into the page as markup, or run it: the content security policy refuses these as well.
MARKUP = re.compile(
    r"innerHTML|outerHTML =|insertAdjacentHTML|dangerouslySetInnerHTML|document\.write|\beval\(|new Function"
)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STATIC)))
def test_a_file_begins_with_its_purpose_and_is_whole(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("//" if path.suffix == ".js" else "/*")
    assert not re.search(r"^(<{7}|={7}$|>{7})", text, re.M)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(STATIC)))
def test_no_text_becomes_markup_or_code(path: Path) -> None:
    assert MARKUP.findall(path.read_text()) == []


def test_each_style_is_named_in_the_page() -> None:
    page = (STATIC / "index.html").read_text()
    assert {path.name for path in (STATIC / "style").iterdir()} == set(re.findall(r"ui/style/([\w-]+\.css)", page))
