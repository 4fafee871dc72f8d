"""The JSON of the calls of a session that have begun and not ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.turns.turn import Turn


def running_json(begun: Mapping[str, float], here: Iterable[Turn]) -> list[dict[str, Any]]:
    """One entry per call, in order of start. Calls of other processes have only their id and start; the rest is null.

    `begun`: ids in the database, with Unix seconds. `here`: turns that run in this process.
    """
    known = {turn.interaction.id: _known(turn) for turn in here}
    unknown = {name: _entry(name, begun_at) for name, begun_at in begun.items() if name not in known}
    return sorted((known | unknown).values(), key=lambda entry: (entry["begun_at"], entry["interaction_id"]))


def _known(turn: Turn) -> dict[str, Any]:
    node = turn.interaction
    counts = {"prompt_tokens": turn.prompt_tokens, "output_tokens": len(node.output_ids)}
    about = {"parent_id": node.parent_id, "api": node.api.value, "purpose": node.purpose, "agent": node.agent}
    return _entry(node.id, node.created_at, here=True, **about, **counts)


def _entry(interaction_id: str, begun_at: float, *, here: bool = False, **more: Any) -> dict[str, Any]:
    empty = dict.fromkeys(("parent_id", "api", "purpose", "agent", "prompt_tokens", "output_tokens"))
    return {"interaction_id": interaction_id, "begun_at": begun_at, "here": here, **empty, **more}
