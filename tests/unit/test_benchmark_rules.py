"""The rules of `benchmarks/`: it measures this server like any other, and its manifest says what it measures."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from benchmarks.gateways import GATEWAYS
from benchmarks.report import markdown, picture

FOLDER = Path(__file__).parents[2] / "benchmarks"
OWN = FOLDER / "gateways" / "tokengrove.py"
SOURCES = sorted(FOLDER.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The top-level packages that a module imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_nothing_imports_this_server_or_its_tests() -> None:
    assert SOURCES
    for path in SOURCES:
        assert not imported(path) & {"tokengrove", "proxy", "tests", "supply", "migrations"}, path


def test_only_one_file_starts_this_server() -> None:
    assert [path for path in SOURCES if '"-m", "tokengrove"' in path.read_text()] == [OWN]


def test_every_gateway_has_a_file_and_an_entry_in_the_manifest() -> None:
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    listed = {entry["name"]: entry for entry in manifest["gateways"]}
    assert listed.keys() == GATEWAYS.keys() - {"pass-through"}
    for name, entry in listed.items():
        gateway = GATEWAYS[name]
        assert (FOLDER / "gateways" / f"{name}.py").exists()
        assert (entry["package"], entry["licence"], entry["wire"]) == (gateway.package, gateway.licence, gateway.wire)
        assert entry["exports_tokens"] == (not gateway.no_tokens)


def test_the_readme_has_the_commands_of_the_manifest_and_every_gateway() -> None:
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    readme = (FOLDER / "README.md").read_text()
    for command in (*manifest["install"], manifest["command"]):
        assert f"\n{command}\n" in readme
    for name, why in manifest["left_out"].items():
        assert name in readme.lower().replace("nemo gym", "nemo-gym") and why
    for entry in manifest["gateways"]:
        assert f"| `{entry['name']}` | " in readme and entry["version"] in readme


def test_every_installed_gateway_has_pinned_requirements() -> None:
    for name in GATEWAYS.keys() - {"pass-through", "tokengrove"}:
        lines = (FOLDER / "requirements" / f"{name}.txt").read_text().splitlines()
        assert all("==" in line for line in lines if not line.startswith("#")), name


@pytest.fixture
def results() -> dict[str, object]:
    times = {"p50_ms": 1.0, "p99_ms": 2.0, "count": 3}
    exact = {"sampled": 1000, "exact": 990, "wrong": 4, "lost": 6, "twice": 2, "moved": 1, "samples": 3}
    exact |= {"sample_tokens": 5000, "broken_turns": 1, "continuing_turns": 9}
    kill = {
        "seen_before": 80,
        "lost_answers": 2,
        "lost_tokens": 147,
        "of_all": {"twice": 5, "lost_turns": 3, "turns": 90},
    }
    kill |= {"failed_sessions": 1, "sessions": 34, "restart_s": 2.5}
    figures = {
        **{"rss_idle_mb": 100.0, "turns": {"cpu_ms": 2.0, "a_core": 500.0}, "latency": times, "exactness": exact},
        **{"streams": {"cpu_us": 50.0, "a_core": 20_000.0, **times}, "memory": {"mb_per_1000": 30.0}, "kill": kill},
    }
    bare = {**figures, "turns": {"cpu_ms": 0.5, "a_core": 2000.0}, "streams": None}
    bare |= {"exactness": {"no_tokens": "bytes", "broken_turns": 9, "continuing_turns": 9}}
    figures["images"] = {"failed": "it did not start:\nno processor"}
    bare["images"] = bare["exactness"]
    bare["kill"] = {"seen_before": 80, "no_tokens": "bytes", "failed_sessions": 0, "sessions": 34, "restart_s": 1.0}
    return {
        **{"machine": {"cpu": "A", "cores": 2, "python": "3.11", "load_before": 0.1}, "took_s": 60, "cpu_s": 40},
        **{"date": "2026-01-01", "command": "--quick"},
        "gateways": {
            "pass-through": {"version": "", "figures": bare},
            "one": {"version": "1.0", "figures": figures},
            "other": {"left_out": "not installed\nmore"},
        },
    }


def test_the_tables_have_every_gateway_and_the_reason_of_one_that_is_left_out(results: dict[str, object]) -> None:
    text = markdown(results)
    assert "| one | 1.0 | 2.00 | 4.0 | 500 | 50 | 20000 | 1.0 | 2.0 | 1.0 | 2.0 | 100 | 30 |" in text
    assert "| one | 1,000 | 990 | 4 | 6 | 2 | 1 | 3 | 5.0 | 1 of 9 |" in text
    assert "| one | 80 | 2 | 147 | 5 | 3 of 90 | 1 of 34 | 2.5 |" in text
    assert "| pass-through | no tokens | - | - | - | - | - | - | - | 9 of 9 |" in text
    assert "| one | it did not start: | - |" in text
    assert "- other is left out. not installed" in text


def test_the_picture_names_what_a_gateway_does_not_have(results: dict[str, object]) -> None:
    drawn = picture(results)
    assert drawn.startswith("<svg ") and drawn.count(">none<") == 2
