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
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS: dict[str, set[str]] = {
    "api": {
        "engine",
        "export_formats",
        "hub",
        "images",
        "models",
        "parsed_items",
        "prompt_ids",
        "protocols",
        "protocols.chat",
        "protocols.completions",
        "protocols.google",
        "rendering",
        "rendering.templates",
        "resources",
        "served_engines",
        "sessions",
        "settings",
        "side_columns",
        "store",
        "store.archive",
        "telemetry",
        "tokengrove",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "tokengrove.rows_beside",
        "tokengrove.spans",
        "tokengrove.texts",
        "trajectory",
        "turns",
        "types",
        "upstream",
        "vision",
        "workers",
    },
    "app": {
        "api",
        "engine",
        "engine.servers",
        "engine.tiny",
        "hub",
        "images",
        "models",
        "progress",
        "rendering",
        "resources",
        "routes",
        "served_engines",
        "sessions",
        "settings",
        "store",
        "store.archive",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.tracing",
        "turns",
        "webhooks",
        "workers",
    },
    "cli": {"tokengrove.commands"},
    "commands": {
        "api",
        "app",
        "engine.servers",
        "progress",
        "rendering",
        "serving",
        "settings",
        "side_columns",
        "store",
        "store.archive",
        "telemetry",
        "tokengrove",
        "tokengrove.commands",
        "tokengrove.demos",
        "tokengrove.errors",
        "tokengrove.initial_block",
        "tokengrove.options",
        "tokengrove.reasons",
        "trajectory",
        "types",
    },
    "engine": {
        "engine.scripted",
        "engine.servers",
        "engine.sglang",
        "engine.tiny",
        "engine.transformers",
        "hub",
        "images",
        "progress",
        "prompt_ids",
        "settings",
        "side_columns",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "types",
        "vision",
    },
    "engine.scripted": {"engine", "tokengrove.errors", "tokengrove.options", "tokengrove.reasons", "types"},
    "engine.servers": {
        "engine",
        "engine.sglang",
        "images",
        "progress",
        "prompt_ids",
        "side_columns",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.image_detail",
        "tokengrove.options",
        "tokengrove.reasons",
        "types",
    },
    "engine.sglang": {
        "engine",
        "hub",
        "images",
        "settings",
        "side_columns",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "tokengrove.rows_beside",
        "types",
        "vision",
    },
    "engine.tiny": {"tokengrove.errors"},
    "engine.transformers": {
        "engine",
        "hub",
        "images",
        "progress",
        "settings",
        "side_columns",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "tokengrove.rows_beside",
        "types",
        "vision",
    },
    "export_formats": {"tokengrove.errors", "tokengrove.options", "trajectory", "types"},
    "hub": {"progress", "settings", "tokengrove.errors"},
    "images": {"tokengrove.errors", "types"},
    "models": {"settings", "tokengrove.errors", "tokengrove.options"},
    "moved": {"tokengrove.old_names"},
    "page": set(),
    "parsed_items": {"types"},
    "progress": set(),
    "prompt_ids": {"types"},
    "protocols": {"parsed_items", "rendering", "tokengrove.errors", "tokengrove.reasons", "types"},
    "protocols.chat": {"parsed_items", "protocols", "rendering", "tokengrove.errors", "tokengrove.reasons", "types"},
    "protocols.completions": {"parsed_items", "protocols", "rendering", "tokengrove.errors", "types"},
    "protocols.google": {
        "parsed_items",
        "protocols",
        "rendering",
        "tokengrove.errors",
        "tokengrove.reasons",
        "types",
    },
    "protocols.messages": {
        "parsed_items",
        "protocols",
        "rendering",
        "tokengrove.errors",
        "tokengrove.reasons",
        "types",
    },
    "protocols.responses": {
        "parsed_items",
        "protocols",
        "rendering",
        "tokengrove.errors",
        "tokengrove.reasons",
        "types",
    },
    "proxy": {"moved"},
    "rendering": {
        "engine",
        "progress",
        "rendering.parsing",
        "rendering.templates",
        "rendering.tool_calls",
        "settings",
        "tokengrove.errors",
        "tokengrove.reasons",
        "types",
        "vision",
    },
    "rendering.parsing": {"rendering", "rendering.tool_calls", "types"},
    "rendering.templates": {"rendering", "tokengrove.errors", "types"},
    "rendering.tool_calls": {"engine", "tokengrove.errors", "types"},
    "resources": {"tokengrove.errors"},
    "routes": {
        "api",
        "engine",
        "images",
        "page",
        "protocols",
        "protocols.chat",
        "protocols.completions",
        "protocols.google",
        "protocols.messages",
        "protocols.responses",
        "rendering",
        "resources",
        "served_engines",
        "sessions",
        "settings",
        "store",
        "store.archive",
        "telemetry",
        "tokengrove.options",
        "tokengrove.spans",
        "trajectory",
        "turns",
        "webhooks",
        "workers",
    },
    "served_engines": {
        "engine",
        "hub",
        "images",
        "models",
        "progress",
        "rendering",
        "resources",
        "settings",
        "tokengrove.errors",
        "tokengrove.options",
        "turns",
        "upstream",
    },
    "serving": {"api", "app", "hub", "progress", "resources", "settings", "telemetry", "tokengrove.errors", "workers"},
    "sessions": {
        "parsed_items",
        "resources",
        "settings",
        "store",
        "store.archive",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "trajectory",
        "types",
    },
    "settings": {"tokengrove.errors", "tokengrove.initial_block", "tokengrove.loopback", "tokengrove.options"},
    "side_columns": {"tokengrove.errors", "tokengrove.options", "tokengrove.rows_beside"},
    "store": {
        "progress",
        "side_columns",
        "store.sql",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "trajectory",
        "types",
    },
    "store.archive": {
        "store",
        "store.sql",
        "tokengrove.errors",
        "tokengrove.reasons",
        "types",
    },
    "store.sql": {
        "side_columns",
        "store",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "trajectory",
        "types",
    },
    "telemetry": {"tokengrove", "tokengrove.spans"},
    "tokengrove": {"tokengrove.client"},
    "tokengrove.__main__": {"tokengrove.commands"},
    "tokengrove.areal": {
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.errors",
        "tokengrove.reasons",
        "tokengrove.rollout",
    },
    "tokengrove.client": {"tokengrove.client.readers", "tokengrove.errors", "tokengrove.rows_beside"},
    "tokengrove.client.adapters": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.image_detail",
        "tokengrove.rows_beside",
    },
    "tokengrove.client.readers": {"tokengrove.client", "tokengrove.errors"},
    "tokengrove.commands": {
        "tokengrove",
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.initial_block",
        "tokengrove.options",
        "tokengrove.reasons",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.harbor",
        "tokengrove.rollout.scorers",
        "tokengrove.runs",
        "tokengrove.runs.config",
        "tokengrove.server_part",
        "tokengrove.terminal",
        "tokengrove.texts",
        "tokengrove.tree_view",
    },
    "tokengrove.demos": {"tokengrove.client", "tokengrove.errors", "tokengrove.texts", "tokengrove.tree_view"},
    "tokengrove.engine": {"engine", "tokengrove.reasons", "tokengrove.server_part", "types"},
    "tokengrove.errors": set(),
    "tokengrove.image_detail": set(),
    "tokengrove.loopback": set(),
    "tokengrove.initial_block": set(),
    "tokengrove.kinds": {
        "tokengrove.areal",
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.openenv",
        "tokengrove.roll.managers",
        "tokengrove.roll.runners",
        "tokengrove.roll.values",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
        "tokengrove.verl",
        "tokengrove.verl.tools",
    },
    "tokengrove.old_names": set(),
    "tokengrove.openenv": {
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.errors",
        "tokengrove.rollout",
        "tokengrove.rollout.command",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.sandboxes",
    },
    "tokengrove.options": {"tokengrove.errors", "tokengrove.reasons"},
    "tokengrove.reasons": set(),
    "tokengrove.roll": {
        "tokengrove.roll.config",
        "tokengrove.roll.managers",
        "tokengrove.roll.rock",
        "tokengrove.roll.runners",
        "tokengrove.roll.scheduler",
        "tokengrove.roll.values",
    },
    "tokengrove.roll.config": {"tokengrove.errors", "tokengrove.roll.values", "tokengrove.rollout"},
    "tokengrove.roll.envs": {"tokengrove.errors", "tokengrove.roll.values"},
    "tokengrove.roll.episodes": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.managers",
        "tokengrove.roll.values",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
    },
    "tokengrove.roll.managers": {
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.runners",
        "tokengrove.roll.values",
        "tokengrove.rollout",
    },
    "tokengrove.roll.rock": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.runners",
        "tokengrove.roll.values",
        "tokengrove.rollout",
        "tokengrove.rollout.sandboxes",
    },
    "tokengrove.roll.runners": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.envs",
        "tokengrove.roll.runners.tools",
        "tokengrove.roll.values",
    },
    "tokengrove.roll.runners.tools": {
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.values",
        "tokengrove.rollout",
        "tokengrove.rollout.sandboxes",
    },
    "tokengrove.roll.scheduler": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.roll.config",
        "tokengrove.roll.rock",
        "tokengrove.roll.values",
        "tokengrove.rollout",
    },
    "tokengrove.roll.values": {"tokengrove.client", "tokengrove.errors"},
    "tokengrove.rollout": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.initial_block",
        "tokengrove.options",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.executors",
        "tokengrove.server_part",
    },
    "tokengrove.rollout.command": {
        "tokengrove.errors",
        "tokengrove.loopback",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.sandboxes",
    },
    "tokengrove.rollout.episodes": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.rollout",
        "tokengrove.rollout.scorers",
    },
    "tokengrove.rollout.executors": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.initial_block",
        "tokengrove.loopback",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
    },
    "tokengrove.rollout.harbor": {
        "tokengrove.client",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.rollout",
        "tokengrove.rollout.command",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.sandboxes",
    },
    "tokengrove.rollout.sandboxes": {
        "tokengrove.errors",
        "tokengrove.initial_block",
        "tokengrove.options",
        "tokengrove.rollout",
    },
    "tokengrove.rollout.scorers": {"tokengrove.client", "tokengrove.errors", "tokengrove.rollout"},
    "tokengrove.rows_beside": set(),
    "tokengrove.runs": {
        "tokengrove.client",
        "tokengrove.client.readers",
        "tokengrove.errors",
        "tokengrove.old_names",
        "tokengrove.options",
        "tokengrove.rollout",
        "tokengrove.rollout.command",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.executors",
        "tokengrove.rollout.harbor",
    },
    "tokengrove.runs.config": {
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.roll.config",
        "tokengrove.roll.episodes",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
    },
    "tokengrove.server_part": {"tokengrove.errors"},
    "tokengrove.spans": set(),
    "tokengrove.terminal": {"tokengrove.client", "tokengrove.reasons", "tokengrove.texts"},
    "tokengrove.testing": {"tokengrove.server_part"},
    "tokengrove.texts": set(),
    "tokengrove.tracing": {"tokengrove.spans"},
    "tokengrove.tree_view": {"tokengrove.client", "tokengrove.reasons", "tokengrove.texts"},
    "tokengrove.trl": {
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.errors",
        "tokengrove.rollout",
        "tokengrove.rollout.episodes",
        "tokengrove.rollout.executors",
    },
    "tokengrove.verl": {
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.errors",
        "tokengrove.reasons",
        "tokengrove.rollout",
        "tokengrove.tracing",
        "tokengrove.verl.tools",
    },
    "tokengrove.verl.tools": {"tokengrove.errors", "tokengrove.rollout"},
    "trajectory": {
        "prompt_ids",
        "side_columns",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "tokengrove.rows_beside",
        "types",
    },
    "turns": {
        "engine",
        "images",
        "models",
        "prompt_ids",
        "protocols",
        "rendering",
        "resources",
        "sessions",
        "settings",
        "side_columns",
        "store",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "trajectory",
        "types",
        "upstream",
        "workers",
    },
    "types": {"resources", "telemetry", "tokengrove.options", "tokengrove.reasons"},
    "upstream": {
        "images",
        "models",
        "protocols",
        "protocols.chat",
        "protocols.messages",
        "protocols.responses",
        "rendering",
        "telemetry",
        "tokengrove.errors",
        "tokengrove.options",
        "tokengrove.reasons",
        "types",
    },
    "vision": {"tokengrove.errors", "tokengrove.image_detail", "types"},
    "webhooks": {"settings", "store", "tokengrove.errors"},
    "workers": {"engine", "telemetry", "tokengrove.errors", "tokengrove.reasons"},
}
OUTSIDE: dict[str, set[str]] = {
    "PIL": {"images", "tokengrove.client", "tokengrove.image_detail", "vision"},
    "alembic": {"store"},
    "datasets": {"tokengrove.roll.rock"},
    "daytona": {"tokengrove.rollout.sandboxes"},
    "e2b": {"tokengrove.rollout.sandboxes"},
    "fastokens": {"rendering"},
    "fsspec": {"store.archive"},
    "gem": {"tokengrove.roll.envs", "tokengrove.roll.runners"},
    "httptools": {"engine.servers", "serving"},
    "httpx": {
        "images",
        "serving",
        "tokengrove.client",
        "tokengrove.openenv",
        "tokengrove.roll.rock",
        "tokengrove.roll.runners",
        "tokengrove.rollout.sandboxes",
        "upstream",
        "webhooks",
        "workers",
    },
    "httpx2": {"tokengrove.client"},
    "huggingface_hub": {"hub"},
    "hydra": {"tokengrove.roll.config"},
    "jinja2": {"rendering.templates"},
    "jiter": {"trajectory", "upstream"},
    "kubernetes": {"tokengrove.rollout.sandboxes"},
    "llguidance": {"engine.transformers"},
    "minijinja": {"rendering.templates"},
    "modal": {"tokengrove.rollout.sandboxes"},
    "numpy": {
        "api",
        "engine",
        "engine.scripted",
        "engine.servers",
        "engine.sglang",
        "engine.tiny",
        "engine.transformers",
        "export_formats",
        "prompt_ids",
        "rendering",
        "side_columns",
        "store.archive",
        "store.sql",
        "tokengrove.areal",
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.client.readers",
        "tokengrove.demos",
        "tokengrove.kinds",
        "tokengrove.roll.envs",
        "tokengrove.roll.managers",
        "tokengrove.roll.runners",
        "tokengrove.roll.scheduler",
        "tokengrove.roll.values",
        "tokengrove.rollout",
        "tokengrove.rows_beside",
        "tokengrove.trl",
        "tokengrove.verl",
        "trajectory",
        "turns",
        "vision",
    },
    "omegaconf": {"tokengrove.roll.config"},
    "openai": {"tokengrove.areal", "tokengrove.demos"},
    "opentelemetry": {"telemetry", "tokengrove.spans", "tokengrove.tracing"},
    "orjson": {
        "api",
        "engine",
        "engine.servers",
        "export_formats",
        "models",
        "parsed_items",
        "prompt_ids",
        "protocols",
        "protocols.chat",
        "protocols.google",
        "protocols.messages",
        "protocols.responses",
        "rendering.templates",
        "settings",
        "store",
        "store.archive",
        "store.sql",
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.client.readers",
        "tokengrove.rollout",
        "tokengrove.runs",
        "trajectory",
        "upstream",
    },
    "peft": {"engine.transformers"},
    "prometheus_client": {"telemetry"},
    "pyarrow": {
        "export_formats",
        "store.archive",
        "tokengrove.client.readers",
        "tokengrove.roll.rock",
        "tokengrove.runs",
    },
    "pydantic": {"tokengrove.rollout.harbor", "tokengrove.verl.tools"},
    "ray": {"tokengrove.rollout.executors"},
    "renderers": {"rendering.templates"},
    "rich": {
        "commands",
        "tokengrove.client",
        "tokengrove.commands",
        "tokengrove.demos",
        "tokengrove.runs",
        "tokengrove.terminal",
        "tokengrove.tree_view",
    },
    "safetensors": {"engine.tiny", "engine.transformers"},
    "sglang": {"engine.sglang"},
    "sqlalchemy": {"store", "store.archive", "store.sql"},
    "starlette": {"api", "app", "commands", "page", "serving"},
    "tensordict": {"tokengrove.client", "tokengrove.client.adapters"},
    "tokenizers": {"engine.tiny", "rendering"},
    "torch": {
        "engine",
        "engine.sglang",
        "engine.tiny",
        "engine.transformers",
        "tokengrove.areal",
        "tokengrove.client",
        "tokengrove.client.adapters",
        "tokengrove.demos",
        "tokengrove.roll.values",
        "vision",
    },
    "transformers": {
        "engine.tiny",
        "engine.transformers",
        "rendering",
        "tokengrove.demos",
        "tokengrove.verl.tools",
        "vision",
    },
    "typer": {"commands", "tokengrove.commands"},
    "uvicorn": {"serving"},
    "uvloop": {"serving"},
    "xxhash": {"images", "parsed_items", "store.sql", "trajectory", "turns"},
    "yaml": {"tokengrove.kinds", "tokengrove.roll.config", "tokengrove.verl", "tokengrove.verl.tools"},
    "zstandard": {"store"},
}
LAZY = {
    *("torch", "transformers", "sglang", "PIL", "renderers", "fastokens", "llguidance", "opentelemetry", "gem"),
    "peft",
    *("httpx2", "tensordict", "trl", "datasets", "verl", "pyarrow", "yaml", "ray", "hydra", "omegaconf"),
    *("e2b", "daytona", "kubernetes", "modal"),
}
"""Heavy or optional packages: imported inside functions only, so that the command line and the app start without."""
LATE_MODULES = {
    *(f"proxy.engine.transformers.{name}" for name in ("batching", "sampler", "steering")),
    *(f"tokengrove.roll.envs.{name}" for name in ("frozen_lake", "sokoban", "sokoban_native", "sokoban_tool_call")),
    "proxy.telemetry.spans",
    "tokengrove.spans",
}
"""Modules that import torch, OpenTelemetry or gem: their importers do so inside a function."""
WIRE_APIS = {"chat", "responses", "messages", "generate", "google"}


@cache
def modules() -> dict[str, Path]:
    """The dotted name of each module of the project, with its file."""
    files = [*(ROOT / "proxy").rglob("*.py"), *(ROOT / "tokengrove").rglob("*.py"), ROOT / "cli.py"]
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}
    return dict(sorted(names.items()))


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text())


@cache
def imported(module: str) -> frozenset[str]:
    """The imports of a module: modules of the project and names of external packages, without the standard library."""
    found = set()
    for node in ast.walk(parsed(module)):
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
    inner = module.removeprefix("proxy.")
    is_package = modules()[module].name == "__init__.py"
    flat = inner.count(".") == inner.startswith("tokengrove.")
    return inner if is_package or flat else inner.rpartition(".")[0]


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


def test_the_package_that_users_import_needs_nothing_of_the_server() -> None:
    """`tokengrove.server_part` looks for the server by name; types of an engine are for type checkers only."""
    needing = {
        module
        for module in modules()
        if module.startswith("tokengrove")
        for name in imported(module)
        if name.startswith("proxy")
    }
    assert needing == {"tokengrove.engine"}
    code = "import sys, tokengrove.engine, tokengrove.testing; print([m for m in sys.modules if m.startswith('proxy')])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter(between(lambda module: module)).prepare()


def packages() -> list[str]:
    return [module for module, file in modules().items() if file.name == "__init__.py"]


def test_the_modules_of_a_package_have_no_circular_imports() -> None:
    """The packages and modules right inside of a package, each with all that it holds."""
    wrong = []
    for package in packages():

        def child(module: str, start: str = f"{package}.") -> str:
            return module.removeprefix(start).partition(".")[0] if module.startswith(start) else ""

        try:
            TopologicalSorter(between(child)).prepare()
        except CycleError as error:
            wrong.append((package, error.args))
    assert packages() and not wrong, wrong


@pytest.mark.parametrize("api", sorted(WIRE_APIS))
def test_no_api_knows_another(api: str) -> None:
    inside = [module for module in modules() if module.startswith("proxy.protocols.") and api in module.split(".")]
    others = {name for module in inside for name in imported(module) if set(name.split(".")) & (WIRE_APIS - {api})}
    assert inside
    assert others == set()


def test_heavy_packages_are_imported_inside_functions_only() -> None:
    for module in modules():
        top = {name for node in parsed(module).body for name in names_of(node)}
        assert module in LATE_MODULES or not top & LAZY, module


def test_the_app_and_the_command_line_import_without_heavy_packages() -> None:
    code = (
        "import sys, proxy.app, proxy.commands.application, tokengrove.commands.application\n"
        f"print([m for m in sys.modules if m in {sorted(LAZY)!r}])"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
