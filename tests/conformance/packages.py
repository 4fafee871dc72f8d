"""Client packages that may be installed; the requirements files in this folder list the tested versions."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from typing import Any

import pytest


def package(name: str) -> Any:
    """Import the module `name` without its warnings; skip the test with the reason if its package is not installed."""
    parts = name.split(".")[
        : 2 if name.startswith("google.") else 1
    ]  # `google` is a namespace package that many distributions share
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
