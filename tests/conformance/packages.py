"""Client packages, where they are installed: `requirements.txt` and `requirements-pinned.txt` beside this file."""

from __future__ import annotations

import warnings
from typing import Any

import pytest


def package(name: str) -> Any:
    """The module `name`; skips the test, saying why, where it is not installed. Its warnings are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed", exc_type=ImportError)
