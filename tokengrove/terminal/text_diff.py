"""The difference of two texts for a terminal: changed lines with `-` and `+`, and their changed words highlighted."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from rich.text import Text

from tokengrove.texts import printable

_WORD = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_WORDS = 4_000
"""Longer blocks are not compared word by word: the time is quadratic in their length."""
_KEPT = 60
"""Characters kept on either side of a change in a long line."""
_STYLES = {"-": ("red", "bold red reverse"), "+": ("green", "bold green reverse")}


def diff(recorded: str, sent: str) -> Iterator[Text]:
    """The lines of `recorded` that `sent` lacks (`-`), the lines in their place (`+`), and one line around each."""
    old, new = printable(recorded).split("\n"), printable(sent).split("\n")
    for number, group in enumerate(SequenceMatcher(None, old, new, autojunk=False).get_grouped_opcodes(1)):
        if number:
            yield Text("  ...", "dim")
        for kind, first, end, new_first, new_end in group:
            if kind == "equal":
                yield from (Text(f"  {_cut(line)}", "dim") for line in old[first:end])
            else:
                yield from _changed("\n".join(old[first:end]), "\n".join(new[new_first:new_end]))


def block(sign: str, text: str) -> Iterator[Text]:
    """A whole text that one side lacks."""
    return _lines(sign, [(printable(text), False)]) if text else iter([Text(f"{sign} (empty)", _STYLES[sign][0])])


def _changed(old: str, new: str) -> Iterator[Text]:
    ours, theirs = _WORD.findall(old), _WORD.findall(new)
    if len(ours) > _MOST_WORDS or len(theirs) > _MOST_WORDS:
        ours, theirs = [old], [new]
    opcodes = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    if ours:
        yield from _lines("-", [("".join(ours[a:b]), kind != "equal") for kind, a, b, _, _ in opcodes])
    if theirs:
        yield from _lines("+", [("".join(theirs[a:b]), kind != "equal") for kind, _, _, a, b in opcodes])


def _lines(sign: str, pieces: Sequence[tuple[str, bool]]) -> Iterator[Text]:
    """The lines of a text from pieces, each marked as changed or equal. Long equal pieces lose their middle."""
    plain, strong = _STYLES[sign]
    text = Text("", plain)
    for piece, changed in pieces:
        text.append(piece if changed else _cut(piece), strong if changed else plain)
    for line in text.split("\n"):
        yield Text.assemble((f"{sign} ", plain), line)


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _KEPT + 5 else f"{text[:_KEPT]} ... {text[-_KEPT:]}"
