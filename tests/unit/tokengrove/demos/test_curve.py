"""The plots show every value at its place, as text and as SVG."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from tokengrove.demos.curve import html_page, svg_curve, text_curve, text_figure

SVG = "{http://www.w3.org/2000/svg}"


def columns(text: str) -> list[str]:
    """The cells of each column, from bottom to top."""
    rows = [line.partition("┤")[2] for line in text.splitlines()]
    return ["".join(cells) for cells in zip(*reversed(rows), strict=True)]


def height(column: str) -> float:
    """The value that a column shows, 0 to 1."""
    return sum(" ▁▂▃▄▅▆▇█".index(cell) for cell in column) / 80


def test_a_column_is_as_high_as_its_value() -> None:
    values = [0.0, 0.05, 0.5, 0.925, 1.0]
    assert [height(column) for column in columns(text_curve(values))] == pytest.approx(values, abs=1 / 160)


def test_many_values_are_averaged_and_none_is_lost() -> None:
    values = [place / 499 for place in range(500)]
    shown = [height(column) for column in columns(text_curve(values))]
    assert len(shown) == 72
    assert shown == sorted(shown)
    assert sum(shown) / 72 == pytest.approx(0.5, abs=0.01)


def test_nothing_yet_is_an_empty_plane() -> None:
    assert [line.rstrip()[-1] for line in text_curve([]).splitlines()] == ["┤"] * 10


def test_the_axis_of_a_figure_names_its_first_and_last_value() -> None:
    for count in (1, 5, 40, 500):
        title, *rows, line, axis = text_figure([0.5] * count, "Reward", "step").splitlines()
        assert title == "Reward" and rows == text_curve([0.5] * count).splitlines()
        assert line.count("─") == min(count, 72)
        assert axis.split() == ["0", "step", str(count - 1)]
    assert len(axis) == len(line)


def test_the_picture_has_a_point_a_value_at_its_height() -> None:
    values = [0.0, 0.25, 1.0]
    root = ElementTree.fromstring(svg_curve(values, "a < b", "across", "up", 0.9))
    points = [point.split(",") for point in root.findall(f".//{SVG}polyline")[0].attrib["points"].split()]
    across, down = [float(x) for x, _ in points], [float(y) for _, y in points]
    assert across[1] - across[0] == pytest.approx(across[2] - across[1], abs=0.2) and across[0] < across[1]
    zero, one = down[0], down[2]
    assert (zero - down[1]) / (zero - one) == pytest.approx(0.25, abs=0.01)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"a < b", "across", "up", "0.9", "0.0", "1.0", "0", "2"} <= {text for text in texts if text}


def test_one_value_can_be_drawn() -> None:
    assert "NaN" not in svg_curve([0.5], "t", "x", "y", 0.9)


def test_the_page_holds_the_picture() -> None:
    svg = svg_curve([0.0, 1.0], "t", "x", "y", 0.9)
    page = html_page(svg, "a & b")
    assert svg in page and "a &amp; b" in page and page.startswith("<!doctype html>")
