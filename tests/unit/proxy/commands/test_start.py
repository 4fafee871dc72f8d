"""The command line starts quickly, and `python -m tokengrove` is the installed command."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[4]
HEAVY = ("numpy", "httpx", "sqlalchemy", "alembic", "starlette", "transformers", "torch")


def output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_commands_are_listed_without_importing_what_only_some_of_them_need() -> None:
    code = f"import sys, tokengrove.commands.application; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert output("-c", code).strip() == "[]"


def test_the_module_and_the_file_at_the_root_are_the_installed_command() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"tokengrove": "tokengrove.commands:main"}
    listed = output("-m", "tokengrove", "--help")
    assert all(command in listed for command in ("serve", "demo", "doctor", "export", "show", "import", "db"))
    assert output("cli.py", "--help") == listed
