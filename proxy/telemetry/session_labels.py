"""The labels of a session's training run in log lines and spans: selected keys of the session's metadata.

Trainers set them at the start of a session. Their values are limited in size, since metadata may have any value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.telemetry.log_lines import Value, cut, plain, without_secrets

LABELS = ("project", "experiment", "step", "sample_index", "rollout_n", "validate")
"""Keys of `metadata` in `start_session`, under the names of verl and its trackers."""

_MOST_CHARACTERS = 100
_MOST_INTEGER = 2**63  # trace collectors accept 64-bit integers


def labels_of(metadata: Mapping[str, Any]) -> dict[str, Value]:
    """Return the labels in `metadata`: numbers and booleans unchanged, texts cut and without secrets.

    Lists, objects and null are ignored.
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
