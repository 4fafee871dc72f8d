"""`tokengrove --version` says what a report of a bug needs, without importing what it names."""

from __future__ import annotations

import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tokengrove
from tokengrove import commands

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_versions_are_printed(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "sglang":
            raise metadata.PackageNotFoundError
        return f"of {package}"

    monkeypatch.setattr(metadata, "version", version)
    done = CliRunner().invoke(commands.app, [flag])
    assert done.exit_code == 0
    found = dict(line.split(None, 1) for line in done.output.splitlines())
    assert found.pop("python").startswith(f"{platform.python_version()}, ")
    assert found == {
        "tokengrove": tokengrove.__version__,
        "torch": "of torch",
        "transformers": "of transformers",
        "sglang": "not installed",
    }


HEAVY = {"torch", "transformers", "sglang", "sqlalchemy", "starlette", "numpy"}


def imported_by(*arguments: str) -> set[str]:
    """The top-level packages that a command imports."""
    code = (
        f"import sys\nsys.argv = ['tokengrove', *{arguments!r}]\nfrom tokengrove.commands import main\n"
        "try:\n    main()\nfinally:\n    print('\\n', *{name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert "typer" in imported
    return imported


def test_nothing_heavy_is_imported_for_the_versions() -> None:
    assert not imported_by("--version") & {
        "torch",
        "transformers",
        "sglang",
        "sqlalchemy",
        "starlette",
        "numpy",
        "rich",
    }


def test_nothing_heavy_is_imported_for_the_help() -> None:
    assert not imported_by("--help") & HEAVY
