"""Client packages, where they are installed: the requirements files beside this one say which are tested."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest


def package(name: str) -> Any:
    """The module `name`; skips the test, saying why, where its package is not installed. Its warnings are not ours."""
    parts = name.split(".")[: 2 if name.startswith("google.") else 1]  # `google` itself is anybody's
    installed = ".".join(parts)
    try:
        found = importlib.util.find_spec(installed)
    except ModuleNotFoundError:
        found = None
    if found is None:
        pytest.skip(f"{installed} is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)
