"""Optional packages. They are imported on first use, so the client depends on none of them."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from tokengrove.errors import InvalidRequest, how_to_get


def library(name: str) -> Any:
    """Import the optional package `name`. Raises InvalidRequest with install instructions if it is missing."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        if (error.name or "").partition(".")[0] != package:
            raise
        raise InvalidRequest(f"this needs {package}: {how_to_get(package)}") from None
