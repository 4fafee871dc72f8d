"""The colours of both themes can be read: contrasts as WCAG 2 asks for them, computed from the file."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

STYLE = Path(__file__).resolve().parents[4] / "proxy" / "page" / "static" / "style"
COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (STYLE / "theme.css").read_text()
    )
}
GROUNDS = ["sunken", "ground", "raised", "hover", "chosen"]
STATES = ["good", "info", "warn", "bad", "past", "still"]
UNDER_TEXT = [name for name in COLOURS if re.match(r"heat-|version-|added-|removed-", name) or name.endswith("-ground")]
READABLE = [
    *product(["text"], GROUNDS + UNDER_TEXT),
    *product(["quiet", "accent"], GROUNDS),
    *product(STATES, ["sunken", "ground", "raised"]),
    *((state, f"{state}-ground") for state in STATES),
    ("accent", "accent-ground"),
    ("on-accent", "accent"),
]
SEEN = [
    *product([f"c{number}" for number in range(1, 9)], ["raised", "ground"]),
    *product(["focus", "line-strong"], ["sunken", "ground", "raised"]),
]


def brightness(colour: str) -> float:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    dark, light = sorted((brightness(one), brightness(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_a_contrast_of_4_5_on_every_ground_it_is_used_on(theme: int) -> None:
    low = {pair: contrast(*(COLOURS[name][theme] for name in pair)) for pair in READABLE}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 4.5} == {}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_lines_of_charts_the_focus_and_edges_of_fields_have_a_contrast_of_3(theme: int) -> None:
    low = {pair: contrast(*(COLOURS[name][theme] for name in pair)) for pair in SEEN}
    assert {pair: round(value, 2) for pair, value in low.items() if value < 3} == {}


def test_no_other_file_names_a_colour() -> None:
    named = re.compile(
        r"#[0-9a-f]{3,8}\b|\b(?:rgb|hsl|oklch|lab)a?\(|:\s*(?:white|black|red|green|blue|gr[ae]y)\b", re.I
    )
    for file in STYLE.glob("*.css"):
        if file.name != "theme.css":
            assert named.findall(re.sub(r"/\*.*?\*/", "", file.read_text(), flags=re.S)) == [], file.name


def test_every_property_that_a_style_uses_is_defined() -> None:
    defined = set(re.findall(r"(--[\w-]+):", "".join(file.read_text() for file in STYLE.glob("*.css"))))
    scripts = "".join(file.read_text() for file in STYLE.parent.rglob("*.js") if "vendor" not in file.parts)
    defined |= set(re.findall(r'"(--[\w-]+)":', scripts))
    for file in STYLE.glob("*.css"):
        used = set(re.findall(r"var\((--[\w-]+)\)", file.read_text()))
        assert used <= defined, (file.name, used - defined)
