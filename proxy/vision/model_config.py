"""Facts about the model in a folder, read from its files: whether it is a vision model, and its placeholder tokens."""

from __future__ import annotations

import json
from pathlib import Path

_OF_PROCESSORS = ("processor_config.json", "preprocessor_config.json")


def is_vision_model(folder: Path) -> bool:
    """Return whether the model's configuration has a vision part, and the folder the files of an image processor."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config.get("vision_config"), dict) and any((folder / name).is_file() for name in _OF_PROCESSORS)


_KINDS = ("image", "video", "audio")
_NAMES = tuple(f"{kind}_token_{end}" for kind in _KINDS for end in ("id", "index"))


def placeholder_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids in ascending order; () for a model without images, or if its configuration cannot be read."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    if not isinstance(config.get("vision_config"), dict):
        return ()
    return tuple(sorted({config[name] for name in _NAMES if isinstance(config.get(name), int)}))
