"""Whether the model in a folder is a vision model, determined from its files without loading any model."""

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
