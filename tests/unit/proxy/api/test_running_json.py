"""Calls that have begun and not ended: each once, with all that is known of it, in order of their begin."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from proxy.api.session_json import running_json
from proxy.turns.turn import Turn
from tests.interactions import interaction


def running(name: str, begun_at: float) -> Turn:
    """A turn that runs in this process."""
    node = replace(interaction(name, output=[1, 2]), created_at=begun_at)
    return cast(Turn, SimpleNamespace(interaction=node, prompt_tokens=7))


def shown(entries: list[dict[str, Any]]) -> list[tuple[str, float, bool, int | None]]:
    return [(each["interaction_id"], each["begun_at"], each["here"], each["output_tokens"]) for each in entries]


def test_what_runs_here_is_not_told_again_as_the_database_has_it() -> None:
    found = running_json({"a": 5.0, "elsewhere": 6.0}, [running("a", 5.0)])
    assert shown(found) == [("a", 5.0, True, 2), ("elsewhere", 6.0, False, None)]


def test_calls_are_in_order_of_their_begin_and_then_of_their_ids() -> None:
    found = running_json({"z": 1.0, "b": 2.0, "a": 3.0}, [running("c", 2.0)])
    assert [each["interaction_id"] for each in found] == ["z", "b", "c", "a"]
