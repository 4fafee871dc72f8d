"""The map of the code: every path in it exists, and its layers are those of the import table."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_layering import PARTS, modules

ROOT = Path(__file__).resolve().parents[2]
MAP = (ROOT / "proxy" / "ARCHITECTURE.md").read_text()


def layers() -> list[set[str]]:
    """The parts of each line of both drawings, from the top down; those of the second have its package before them."""
    server, users = (drawing.partition("```")[0] for drawing in MAP.split("```text\n")[1:])
    return [
        *(set(re.split(r" {3,}", line)[0].split()) for line in server.splitlines()),
        *({f"tokengrove.{name}" for name in re.split(r" {3,}", line)[0].split()} for line in users.splitlines()),
    ]


def top_of(part: str) -> str:
    """The package or module right inside of `proxy` or `tokengrove` that holds a part; "" for these themselves."""
    if part in ("proxy", "tokengrove", "cli"):
        return ""
    names = part.split(".")
    return ".".join(names[: 2 if names[0] == "tokengrove" else 1])


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", MAP))))
def test_every_module_that_the_map_names_exists(name: str) -> None:
    if name.endswith(".js"):
        assert list((ROOT / "proxy/page/static").rglob(name))
    else:
        assert {name, f"proxy.{name}"} & modules().keys()


def test_every_part_is_drawn_in_one_layer() -> None:
    drawn = [part for layer in layers() for part in layer]
    assert sorted(drawn) == sorted({top_of(part) for part in PARTS} - {""})


def test_each_layer_imports_from_lower_layers_only() -> None:
    height = {part: -line for line, layer in enumerate(layers()) for part in layer}
    for part, imported in PARTS.items():
        if (top := top_of(part)) and top != "tokengrove.engine":  # it imports definitions of the server as types only
            below = {top_of(other) for other in imported} - {top, ""}
            assert {other for other in below if height[other] >= height[top]} == set(), part


def test_every_package_has_a_docstring() -> None:
    for folder in {path.parent for root in ("proxy", "tokengrove") for path in (ROOT / root).rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder
