"""A fault that is planted in a copy of the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plant:
    """`old` in `path` becomes `new`; `scenario` of `module` runs that code, and finds it within `seeds`."""

    name: str
    scenario: str
    path: str
    old: str
    new: str
    module: str = "tests.torture"
    seeds: int = 200
