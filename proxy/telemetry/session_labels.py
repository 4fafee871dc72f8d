"""What log lines and spans say of the training run that a session belongs to: some keys of its metadata, and no other.

Trainers set them at the start of a session. They are bounded, because metadata may hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.telemetry.log_lines import Value, cut, plain, without_secrets

LABELS = ("project", "experiment", "step", "sample_index", "rollout_n", "validate")
"""Keys of `metadata` in `start_session`, by the names that verl and its trackers have for them."""

_MOST_CHARACTERS = 100
_MOST_INTEGER = 2**63  # collectors of traces take integers of 64 bits


def labels_of(metadata: Mapping[str, Any]) -> dict[str, Value]:
    """Return the labels that `metadata` has: numbers and booleans as they are, texts cut and without secrets.

    Lists, objects and null are no labels.
    """
    if not metadata:
        return {}
    return {name: _short(value) for name in LABELS if isinstance(value := metadata.get(name), str | int | float)}


def _short(value: str | int | float) -> Value:
    if isinstance(value, str):
        return cut(without_secrets(value), _MOST_CHARACTERS)
    if isinstance(value, int):
        return value if -_MOST_INTEGER <= value < _MOST_INTEGER else str(value)
    return plain(value)
