"""An ended session in a list of those that ended last."""

from __future__ import annotations

from typing import NamedTuple


class Ended(NamedTuple):
    """An ended session. `updated_at`: its last change, Unix seconds. `turns`: how many it has, of any status."""

    session_id: str
    updated_at: float
    turns: int
