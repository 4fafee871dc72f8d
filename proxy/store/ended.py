"""An entry in a list of the sessions that ended last."""

from __future__ import annotations

from typing import NamedTuple


class Ended(NamedTuple):
    """An ended session. `updated_at`: its last change, Unix seconds. `turns`: the number of turns of any status."""

    session_id: str
    updated_at: float
    turns: int
