"""The entries of `docs/decisions.md` are short."""

from __future__ import annotations

import re

from tests.docs.pages import ROOT

MOST_WORDS = 40
ENTRY = re.compile(r"^### (.+)\n((?:(?!##).*\n)*)", re.M)


def entries(text: str) -> dict[str, str]:
    """The text of each decision by its heading."""
    return dict(ENTRY.findall(text))


def test_a_decision_has_at_most_40_words() -> None:
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    decisions = entries(page)
    assert len(decisions) == page.count("\n### ") > 0
    words = {heading: len(text.split()) for heading, text in decisions.items()}
    assert {heading: count for heading, count in words.items() if not 0 < count <= MOST_WORDS} == {}


def test_the_text_of_a_decision_ends_before_the_next_heading() -> None:
    assert entries("# A\n\n### B\n\nOne two\nthree.\n\n## C\n\nNot counted.\n\n### D\nFour.\n") == {
        "B": "\nOne two\nthree.\n\n",
        "D": "Four.\n",
    }
