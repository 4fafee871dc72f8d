"""Each page says for whom it is, and all pages together stay short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

PAGES = sorted((ROOT / "docs").glob("*.md"))
MOST_WORDS = 64_500
READERS = re.compile(r"\b(for|to) (those|people|everybody|operators|users)\b", re.I)
CODE = re.compile(r"^( *)(`{3,}).*?^\1\2\s*$", re.M | re.S)
WRITTEN_FROM_CODE = re.compile(r"<!-- options: .*?<!-- end of the options -->", re.S)


def words_by_hand(text: str) -> int:
    """The words outside of code blocks, comments and the tables that are written from the code."""
    text = re.sub(r"<!--.*?-->", "", CODE.sub("", WRITTEN_FROM_CODE.sub("", text)))
    return sum(bool(re.search(r"\w", word)) for word in text.replace("|", " ").split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_for_whom_it_is_before_its_first_section(page: Path) -> None:
    introduction = page.read_text(encoding="utf-8").partition("\n## ")[0]
    assert READERS.search(" ".join(introduction.split()))


def test_the_documents_do_not_grow_by_hand() -> None:
    words = {page.name: words_by_hand(page.read_text(encoding="utf-8")) for page in [ROOT / "README.md", *PAGES]}
    assert sum(words.values()) <= MOST_WORDS, words


def test_blocks_comments_and_tables_from_the_code_are_no_words_by_hand() -> None:
    table = "<!-- options: x, written by y -->\n\n| three more words |\n\n<!-- end of the options -->\n"
    assert words_by_hand(f"# One\n\n```text\nnot counted\n```\n{table}<!-- prints -->\n| two |\n") == 2
