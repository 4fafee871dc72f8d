"""The import table of the design, exactly: what each part may import from the project, and from outside."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"types", "errors", "settings"}
TURN_PARTS = {
    "attempts",
    "protocols",
    "rendering",
    "trajectory",
    "engine",
    "store",
    "session",
    "sessions",
    "replica",
    "keys",
    "rewards",
    "budgets",
    "metrics",
}
ALLOWED = {
    "types": set(),
    "errors": set(),
    "metrics": set(),
    "settings": {"errors", "types"},
    "versions": {"errors", "types"},
    "protocols": {"types", "errors"},
    "rendering": SHARED,
    "trajectory": SHARED,
    "formats": SHARED | {"trajectory"},
    "engine": SHARED | {"versions"},
    "store": SHARED,
    "keys": SHARED | {"store"},
    "attempts": SHARED,
    "session_ids": {"errors"},
    "replica": SHARED | {"attempts", "trajectory", "store"},
    "session": SHARED | {"attempts", "trajectory", "store"},
    "sessions": SHARED | {"session_ids", "session", "attempts", "replica", "trajectory", "store", "keys", "metrics"},
    "access": SHARED | {"session_ids", "session", "sessions", "keys"},
    "rewards": SHARED | {"session"},
    "budgets": SHARED | {"session"},
    "sampling": SHARED | {"engine"},
    "retries": SHARED | {"attempts", "turn"},
    "turn": SHARED | TURN_PARTS | {"versions"},
    "prompts": SHARED | {"session", "sessions", "rendering", "trajectory", "turn"},
    "commits": SHARED | {"attempts", "replica", "sessions", "store", "trajectory", "turn", "metrics"},
    "turns": SHARED | TURN_PARTS | {"turn", "sampling", "retries", "prompts", "commits"},
    "generation": SHARED | {"engine", "versions"},
    "api": SHARED
    | {
        "access",
        "turns",
        "turn",
        "session_ids",
        "session",
        "sessions",
        "sampling",
        "generation",
        "rewards",
        "protocols",
        "trajectory",
        "formats",
        "engine",
        "store",
        "metrics",
    },
    "audit": SHARED | {"store", "trajectory"},
    "client": {"errors"},
    "export_flags": {"errors"},
    "rollout": {"client", "errors"},
    "server": SHARED | {"app", "turns"},
    "cli": SHARED | {"app", "server", "client", "export_flags", "rollout", "store", "audit"},
}
OUTSIDE = {
    "starlette": {"app", "api", "server", "cli"},
    "sqlalchemy": {"store"},
    "torch": {"engine", "rendering", "client", "rollout"},  # rollout: the demo's trainer, which has weights of its own
    "tensordict": {"client"},
    "trl": {"client"},
    "datasets": {"client"},
    "verl": {"client"},
    "sglang": {"engine", "rendering"},
    "transformers": {"engine", "rendering", "rollout"},
    "renderers": {"engine", "rendering"},
    "fastokens": {"engine", "rendering"},
    "llguidance": {"engine", "rendering"},
    "pyarrow": {"formats", "client"},
}
LAZY = {
    "torch",
    "tensordict",
    "trl",
    "datasets",
    "verl",
    "sglang",
    "transformers",
    "renderers",
    "fastokens",
    "llguidance",
    "pyarrow",
}


def parts() -> list[tuple[str, Path]]:
    files = [
        (path.relative_to(ROOT / "proxy").parts[0].removesuffix(".py"), path) for path in (ROOT / "proxy").rglob("*.py")
    ]
    return [*((part, path) for part, path in files if part != "__init__"), ("cli", ROOT / "cli.py")]


def imports(path: Path, *, top_level_only: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize(("part", "path"), parts(), ids=lambda value: value.stem if isinstance(value, Path) else value)
def test_a_part_imports_only_what_the_table_allows(part: str, path: Path) -> None:
    if part == "app":
        return
    inside = {name.split(".")[1] for name in imports(path) if name.startswith("proxy.")}
    assert inside - {part} <= ALLOWED[part]
    for package, holders in OUTSIDE.items():
        if any(name.split(".")[0] == package for name in imports(path)):
            assert part in holders, f"{path} imports {package}"


def test_heavy_packages_are_imported_inside_functions_only() -> None:
    for _, path in parts():
        top = {name.split(".")[0] for name in imports(path, top_level_only=True)}
        sampling = path.name in (
            "sampler.py",
            "batching.py",
            "steering.py",
        )  # torch modules, imported lazily themselves
        assert sampling or not top & LAZY, path


def test_the_app_imports_without_heavy_packages() -> None:
    code = f"import sys, proxy.app, cli; print([m for m in sys.modules if m in {sorted(LAZY)!r}])"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
