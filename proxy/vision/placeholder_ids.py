"""The tokens that stand for images, videos and sounds in the ids of a vision model. An engine must never sample one.

They are read from the model's config.json, so that servers that load no processor also know them.
"""

from __future__ import annotations

import json
from pathlib import Path

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
