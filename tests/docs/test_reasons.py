"""Every word that replies and exports use as a reason is defined in the docs, in the words of the code."""

from __future__ import annotations

import inspect
import re

import pytest

from proxy.store.notes import notes_of
from tests.docs.pages import ROOT
from tokengrove.reasons import Explained, Note

KINDS = Explained.__subclasses__()
TABLES = "\n".join((ROOT / "docs" / f"{name}.md").read_text() for name in ("concepts", "trajectories", "http-api"))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_reason_has_a_row_with_its_meaning(kind: type[Explained]) -> None:
    rows = set(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", TABLES, re.M))
    for word in kind:
        assert word.meaning, word
        assert (word.value, word.meaning) in rows, word


def test_no_other_enum_has_the_words_of_a_reason_without_a_meaning() -> None:
    """An enum whose docstring says why something happened must say what each of its words means."""
    for path in (ROOT / "proxy").rglob("*.py"):
        for name, why in re.findall(r'^class (\w+)\(StrEnum\):\n    """(\w+)', path.read_text(), re.M):
            assert why != "Why", f"{path}: {name}"


def test_every_note_has_a_name_with_a_meaning() -> None:
    source = inspect.getsource(notes_of)
    assert set(re.findall(r'notes\["(\w+)"\]', source)) == set(Note)
