"""The map of the code: every path in it exists, and its layers are those of the import table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_layering import PARTS, modules

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "proxy" / "ARCHITECTURE.md").read_text()
ASIDE = {"audit", "client", "rollout", "demos", "tree_view", "terminal", "cli", "tokengrove", "proxy"}
"""Parts that stand beside the layers."""


def layers() -> list[set[str]]:
    """The parts of each line of the drawing, from the top down."""
    drawing = MAP.partition("```text\n")[2].partition("```")[0]
    return [set(re.split(r" {3,}", line)[0].split()) for line in drawing.splitlines()]


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", MAP)) - {"tokengrove.py"}))
def test_every_module_that_the_map_names_exists(name: str) -> None:
    if name.endswith(".js"):
        assert list((ROOT / "proxy/page/static").rglob(name))
    else:
        assert f"proxy.{name}" in modules()


def test_every_part_is_drawn_in_one_layer_or_listed_aside() -> None:
    drawn = [part for layer in layers() for part in layer]
    assert sorted(drawn) == sorted({part.partition(".")[0] for part in PARTS} - ASIDE)


def test_each_layer_imports_from_lower_layers_only() -> None:
    height = {part: -line for line, layer in enumerate(layers()) for part in layer}
    for part, imported in PARTS.items():
        top = part.partition(".")[0]
        if top in height:
            below = {other.partition(".")[0] for other in imported} - ASIDE - {top}
            assert {other for other in below if height[other] >= height[top]} == set(), part


def test_every_package_has_a_docstring() -> None:
    for folder in {path.parent for path in (ROOT / "proxy").rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
