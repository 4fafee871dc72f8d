"""The migrations of this installation, by the names of their files.

No module is imported: a start with a current database does not import alembic, which takes longer than the rest.
"""

from __future__ import annotations

from pathlib import Path

from tokengrove.errors import ConfigurationError


def head() -> str:
    """The newest revision that this code has a migration for, such as `0012`. Revisions compare as texts."""
    names = [path.name.partition("_")[0] for path in (folder() / "versions").glob("[0-9]*_*.py")]
    if not names:
        raise ConfigurationError("the migrations are missing from this installation; install tokengrove again")
    return max(names)


def folder() -> Path:
    """The folder of the migrations: in the package, or next to it in a checkout. Raises ConfigurationError."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError("the migrations are missing from this installation; install tokengrove again")
