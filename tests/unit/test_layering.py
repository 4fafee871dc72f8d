"""The import tables, exactly: an import that a table lacks fails, and so does an entry that nothing imports.

Imports inside functions and under TYPE_CHECKING count like any other. A part is a package of `proxy`, a package inside
of one, or a module that lies flat in `proxy`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS: dict[str, set[str]] = {
    "api": {
        "engine",
        "errors",
        "export_formats",
        "hub",
        "images",
        "telemetry",
        "parsed_items",
        "prompt_ids",
        "protocols",
        "protocols.chat",
        "proxy",
        "reasons",
        "rendering",
        "rendering.templates",
        "resources",
        "sessions",
        "settings",
        "store",
        "trajectory",
        "turns",
        "types",
        "workers",
        "vision",
    },
    "app": {
        "images",
        "api",
        "engine",
        "engine.tiny",
        "errors",
        "hub",
        "progress",
        "rendering",
        "resources",
        "routes",
        "sessions",
        "settings",
        "store",
        "telemetry",
        "turns",
        "workers",
    },
    "cli": {"commands"},
    "client": {"client.readers", "errors"},
    "client.adapters": {"client", "errors", "vision"},
    "client.readers": {"client", "errors"},
    "commands": {
        "api",
        "app",
        "client",
        "errors",
        "initial_block",
        "progress",
        "proxy",
        "reasons",
        "rollout",
        "rollout.episodes",
        "rollout.harbor",
        "rollout.runs",
        "rollout.runs.config",
        "demos",
        "serving",
        "settings",
        "store",
        "telemetry",
        "terminal",
        "trajectory",
        "tree_view",
        "types",
    },
    "demos": {"client", "errors", "tree_view"},
    "engine": {
        "engine.scripted",
        "engine.servers",
        "engine.sglang",
        "engine.tiny",
        "engine.transformers",
        "errors",
        "hub",
        "images",
        "telemetry",
        "progress",
        "prompt_ids",
        "reasons",
        "settings",
        "types",
        "vision",
    },
    "engine.scripted": {"engine", "errors", "reasons", "types"},
    "engine.servers": {
        *("engine", "engine.sglang", "errors", "images", "progress", "prompt_ids", "reasons", "telemetry", "types"),
        "vision",
    },
    "engine.sglang": {"engine", "errors", "hub", "images", "reasons", "settings", "types", "vision"},
    "engine.tiny": {"errors"},
    "engine.transformers": {
        *("engine", "errors", "hub", "images", "progress", "reasons", "settings", "types", "vision"),
    },
    "errors": set(),
    "export_formats": {"errors", "trajectory", "types"},
    "hub": {"errors", "progress", "settings"},
    "initial_block": set(),
    "images": {"errors", "types"},
    "telemetry": {"proxy"},
    "page": set(),
    "parsed_items": {"types"},
    "progress": set(),
    "prompt_ids": {"types"},
    "protocols": {"errors", "parsed_items", "reasons", "rendering", "types"},
    "protocols.chat": {"errors", "parsed_items", "protocols", "reasons", "rendering", "types"},
    "protocols.completions": {"errors", "parsed_items", "protocols", "rendering", "types"},
    "protocols.messages": {"errors", "parsed_items", "protocols", "reasons", "rendering", "types"},
    "protocols.responses": {"errors", "parsed_items", "protocols", "reasons", "rendering", "types"},
    "proxy": set(),
    "reasons": set(),
    "rendering": {
        "engine",
        "errors",
        "progress",
        "reasons",
        "rendering.parsing",
        "rendering.templates",
        "rendering.tool_calls",
        "settings",
        "types",
        "vision",
    },
    "rendering.parsing": {"rendering", "rendering.tool_calls", "types"},
    "rendering.templates": {"errors", "rendering", "types"},
    "rendering.tool_calls": {"engine", "errors", "types"},
    "resources": {"errors"},
    "rollout": {"client", "errors"},
    "rollout.areal": {"client", "client.adapters", "errors", "rollout"},
    "rollout.openenv": {
        "client",
        "client.adapters",
        "errors",
        "rollout",
        "rollout.command",
        "rollout.episodes",
        "rollout.sandboxes",
    },
    "rollout.roll": {
        "rollout.roll.config",
        "rollout.roll.managers",
        "rollout.roll.rock",
        "rollout.roll.runners",
        "rollout.roll.scheduler",
        "rollout.roll.values",
    },
    "rollout.roll.config": {"errors", "rollout", "rollout.roll.values"},
    "rollout.roll.managers": {
        "client",
        "client.adapters",
        "errors",
        "rollout",
        "rollout.roll.config",
        "rollout.roll.runners",
        "rollout.roll.values",
    },
    "rollout.episodes": {"client", "errors", "rollout", "rollout.scorers"},
    "rollout.scorers": {"client", "errors", "rollout"},
    "rollout.command": {"errors", "rollout", "rollout.episodes", "rollout.sandboxes"},
    "rollout.harbor": {"client", "errors", "rollout", "rollout.command", "rollout.episodes", "rollout.sandboxes"},
    "rollout.executors": {"client", "errors", "initial_block", "rollout", "rollout.episodes"},
    "rollout.kinds": {
        "client",
        "errors",
        "rollout",
        "rollout.areal",
        "rollout.episodes",
        "rollout.openenv",
        "rollout.roll.managers",
        "rollout.roll.runners",
        "rollout.roll.values",
        "rollout.verl",
        "rollout.verl.tools",
    },
    "rollout.roll.episodes": {
        "client",
        "errors",
        "rollout",
        "rollout.episodes",
        "rollout.roll.config",
        "rollout.roll.managers",
        "rollout.roll.values",
    },
    "rollout.roll.rock": {
        "client",
        "errors",
        "rollout",
        "rollout.roll.config",
        "rollout.roll.runners",
        "rollout.roll.values",
        "rollout.sandboxes",
    },
    "rollout.roll.envs": {"errors", "rollout.roll.values"},
    "rollout.roll.runners": {
        "client",
        "errors",
        "rollout.roll.config",
        "rollout.roll.envs",
        "rollout.roll.runners.tools",
        "rollout.roll.values",
    },
    "rollout.roll.runners.tools": {
        "errors",
        "rollout",
        "rollout.roll.config",
        "rollout.roll.values",
        "rollout.sandboxes",
    },
    "rollout.roll.scheduler": {
        "client",
        "errors",
        "rollout",
        "rollout.roll.config",
        "rollout.roll.rock",
        "rollout.roll.values",
    },
    "rollout.roll.values": {"client", "errors"},
    "rollout.runs": {
        "client",
        "client.readers",
        "errors",
        "rollout",
        "rollout.episodes",
        "rollout.executors",
        "rollout.harbor",
    },
    "rollout.runs.config": {
        "errors",
        "rollout",
        "rollout.episodes",
        "rollout.roll.config",
        "rollout.roll.episodes",
    },
    "rollout.sandboxes": {"errors", "initial_block", "rollout"},
    "rollout.trl": {"client", "client.adapters", "errors", "rollout", "rollout.episodes", "rollout.executors"},
    "rollout.verl": {"client", "client.adapters", "errors", "rollout", "rollout.verl.tools", "telemetry"},
    "rollout.verl.tools": {"errors", "rollout"},
    "routes": {
        "api",
        "engine",
        "page",
        "protocols",
        "protocols.chat",
        "protocols.completions",
        "protocols.messages",
        "protocols.responses",
        "rendering",
        "resources",
        "sessions",
        "settings",
        "store",
        "telemetry",
        "turns",
        "workers",
    },
    "serving": {"api", "app", "errors", "hub", "progress", "resources", "settings", "telemetry", "workers"},
    "sessions": {
        "errors",
        "telemetry",
        "parsed_items",
        "reasons",
        "resources",
        "settings",
        "store",
        "trajectory",
        "types",
    },
    "settings": {"errors", "initial_block", "types"},
    "store": {"errors", "progress", "reasons", "store.sql", "telemetry", "types"},
    "store.sql": {"errors", "reasons", "store", "types"},
    "tokengrove": {"client"},
    "trajectory": {"prompt_ids", "reasons", "types"},
    "turns": {
        "images",
        "engine",
        "errors",
        "telemetry",
        "prompt_ids",
        "protocols",
        "reasons",
        "rendering",
        "resources",
        "sessions",
        "settings",
        "store",
        "trajectory",
        "types",
        "workers",
    },
    "terminal": {"client", "reasons", "trajectory", "tree_view"},
    "tree_view": {"client"},
    "types": {"reasons", "resources", "telemetry"},
    "vision": {"errors", "types"},
    "workers": {"engine", "errors", "telemetry", "reasons"},
}
OUTSIDE: dict[str, set[str]] = {
    "PIL": {"client", "images", "vision"},
    "alembic": {"store"},
    "datasets": {"rollout.roll.rock"},
    "fastokens": {"rendering"},
    "gem": {"rollout.roll.envs", "rollout.roll.runners"},
    "httptools": {"engine.servers", "serving"},
    "httpx": {"client", "images", "rollout.openenv", "rollout.roll.rock", "rollout.roll.runners", "workers"},
    "httpx2": {"client"},
    "huggingface_hub": {"hub"},
    "jinja2": {"rendering.templates"},
    "jiter": {"trajectory"},
    "llguidance": {"engine.transformers"},
    "minijinja": {"rendering.templates"},
    "numpy": {
        "api",
        "client",
        "client.adapters",
        "client.readers",
        "engine.scripted",
        "engine.servers",
        "engine.tiny",
        "engine.transformers",
        "export_formats",
        "prompt_ids",
        "rendering",
        "demos",
        "rollout",
        "rollout.areal",
        "rollout.kinds",
        "rollout.roll.envs",
        "rollout.roll.managers",
        "rollout.roll.runners",
        "rollout.roll.scheduler",
        "rollout.roll.values",
        "rollout.trl",
        "trajectory",
        "rollout.verl",
        "vision",
    },
    "openai": {"demos", "rollout.areal"},
    "opentelemetry": {"telemetry"},
    "orjson": {
        "api",
        "client",
        "client.adapters",
        "client.readers",
        "engine.servers",
        "export_formats",
        "parsed_items",
        "prompt_ids",
        "protocols",
        "protocols.chat",
        "protocols.messages",
        "protocols.responses",
        "rendering.templates",
        "rollout",
        "rollout.runs",
        "store",
        "store.sql",
        "trajectory",
    },
    "prometheus_client": {"telemetry"},
    "pyarrow": {"client.readers", "export_formats", "rollout.roll.rock", "rollout.runs"},
    "pydantic": {"rollout.harbor", "rollout.verl.tools"},
    "ray": {"rollout.executors"},
    "renderers": {"rendering.templates"},
    "rich": {"client", "commands", "demos", "rollout.runs", "terminal", "tree_view"},
    "safetensors": {"engine.tiny"},
    "sglang": {"engine.sglang"},
    "sqlalchemy": {"store", "store.sql"},
    "starlette": {"api", "app", "commands", "page", "serving"},
    "tensordict": {"client", "client.adapters"},
    "tokenizers": {"engine.tiny", "rendering"},
    "torch": {
        "client",
        "client.adapters",
        "demos",
        "engine",
        "engine.sglang",
        "engine.tiny",
        "engine.transformers",
        "rollout.areal",
        "rollout.roll.values",
        "vision",
    },
    "transformers": {"demos", "engine.tiny", "engine.transformers", "rendering", "rollout.verl.tools", "vision"},
    "typer": {"commands"},
    "uvicorn": {"serving"},
    "uvloop": {"serving"},
    "xxhash": {"images", "parsed_items", "store.sql", "trajectory", "turns"},
    "yaml": {"rollout.kinds", "rollout.roll.config", "rollout.verl", "rollout.verl.tools"},
    "zstandard": {"store"},
}
LAZY = {
    *("torch", "transformers", "sglang", "PIL", "renderers", "fastokens", "llguidance", "opentelemetry", "gem"),
    *("httpx2", "tensordict", "trl", "datasets", "verl", "pyarrow", "yaml", "ray"),
}
"""Heavy or optional packages: imported inside functions only, so that the command line and the app start without."""
LATE_MODULES = {
    *(f"proxy.engine.transformers.{name}" for name in ("batching", "sampler", "steering")),
    *(f"proxy.rollout.roll.envs.{name}" for name in ("frozen_lake", "sokoban", "sokoban_native", "sokoban_tool_call")),
    "proxy.telemetry.spans",
}
"""Modules that import torch, OpenTelemetry or gem: their importers do so inside a function."""
WIRE_APIS = {"chat", "responses", "messages", "generate"}


@cache
def modules() -> dict[str, Path]:
    """The dotted name of each module of the project, with its file."""
    files = [*(ROOT / "proxy").rglob("*.py"), ROOT / "cli.py", ROOT / "tokengrove.py"]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return dict(sorted(names.items()))


@cache
def imported(module: str) -> frozenset[str]:
    """The imports of a module: modules of the project and names of external packages, without the standard library."""
    found = set()
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        found.update(names_of(node))
    return frozenset(found - {module})


def names_of(node: ast.AST) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    for name in names:
        if name in modules():
            yield name
        elif name.rpartition(".")[0] in modules():
            yield name.rpartition(".")[0]
        elif name.partition(".")[0] not in sys.stdlib_module_names:
            yield name.partition(".")[0]


def part_of(module: str) -> str:
    """The package of a module, without `proxy`; a module outside the packages is a separate part."""
    if not module.startswith("proxy."):
        return module
    inner = module.removeprefix("proxy.")
    is_package = modules()[module].name == "__init__.py"
    return inner if is_package or "." not in inner else inner.rpartition(".")[0]


def between(part: Callable[[str], str]) -> dict[str, set[str]]:
    """For each part, the other parts that it imports; modules of no part ("") are left out."""
    edges: dict[str, set[str]] = {part(module): set() for module in modules() if part(module)}
    for module in modules():
        if part(module):
            edges[part(module)] |= {part(name) for name in imported(module) if name in modules()} - {part(module), ""}
    return edges


def outside() -> dict[str, set[str]]:
    """For each package from outside the parts that import it."""
    holders: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for name in imported(module) - set(modules()):
            holders[name].add(part_of(module))
    return dict(holders)


def test_each_part_imports_exactly_the_parts_in_the_table() -> None:
    found = between(part_of)
    assert found.keys() == PARTS.keys()
    assert {part: found[part] for part in PARTS if found[part] != PARTS[part]} == {}


def test_each_external_package_is_imported_by_exactly_the_parts_in_the_table() -> None:
    assert outside() == OUTSIDE


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(between(lambda module: module)).prepare()


def packages() -> list[str]:
    return [module for module, file in modules().items() if file.name == "__init__.py"]


@pytest.mark.parametrize("package", packages())
def test_the_modules_of_a_package_have_no_circular_imports(package: str) -> None:
    """The packages and modules right inside of `package`, each with all that it holds."""

    def child(module: str) -> str:
        return module.removeprefix(f"{package}.").partition(".")[0] if module.startswith(f"{package}.") else ""

    TopologicalSorter(between(child)).prepare()


@pytest.mark.parametrize("api", sorted(WIRE_APIS))
def test_no_api_knows_another(api: str) -> None:
    inside = [module for module in modules() if module.startswith("proxy.protocols.") and api in module.split(".")]
    others = {name for module in inside for name in imported(module) if set(name.split(".")) & (WIRE_APIS - {api})}
    assert inside
    assert others == set()


def test_heavy_packages_are_imported_inside_functions_only() -> None:
    for module, file in modules().items():
        top = {name for node in ast.parse(file.read_text()).body for name in names_of(node)}
        assert module in LATE_MODULES or not top & LAZY, module


def test_the_app_and_the_command_line_import_without_heavy_packages() -> None:
    code = f"import sys, proxy.app, proxy.commands; print([m for m in sys.modules if m in {sorted(LAZY)!r}])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
