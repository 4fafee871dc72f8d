"""`tokengrove serve --print-config`: the effective settings as a configuration file, with the origin of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from proxy.settings.kinds import masked
from proxy.settings.sources import Sources


def effective(sources: Sources) -> str:
    """The settings as TOML. Keys and passwords are masked; a setting without a value is a comment."""
    return "\n".join(_lines(sources))


def _lines(sources: Sources) -> Iterator[str]:
    for spec in fields(sources.settings):
        value = masked(spec.name, getattr(sources.settings, spec.name))
        origin = sources.origins.get(spec.name, "default")
        yield f"# {spec.name} =  # {origin}" if value is None else f"{spec.name} = {_toml(value)}  # {origin}"


def _toml(value: Any) -> str:
    """The value as TOML. The JSON of booleans, numbers, texts and lists of texts is valid TOML."""
    return json.dumps(value, ensure_ascii=False)
