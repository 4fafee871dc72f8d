"""`tokengrove --version`: prints the versions that a bug report needs, without slow imports."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from tokengrove import __version__

_ENGINES = ("torch", "transformers", "sglang")


def show_version(asked: bool) -> None:
    """Print the versions of tokengrove, Python and the packages of engines, and exit, if `asked`."""
    if asked:
        lines = [("tokengrove", __version__), ("python", f"{platform.python_version()}, {platform.platform()}")]
        lines += [(name, _installed(name)) for name in _ENGINES]
        for name, version in lines:
            print(f"{name:13}{version}")
        raise typer.Exit


def _installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
