"""Golden cases: facts that were measured or worked out by hand, as data. No test may change them to pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def load(name: str) -> list[Any]:
    """The cases of `<name>.json` as parameters, each with its name as id."""
    text = (Path(__file__).parent / f"{name}.json").read_text(encoding="utf-8")
    return [pytest.param(case, id=case["name"]) for case in json.loads(text)["cases"]]
