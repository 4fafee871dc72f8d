"""JSON files of a model folder. A missing file gives an empty object; a broken file is a ConfigurationError."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokengrove.errors import ConfigurationError


def read_json(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file, empty if there is no file. Raises ConfigurationError for a broken file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}
