"""Imports the server, the package `proxy`, which may be missing or hidden by another package named `proxy`."""

from __future__ import annotations

from importlib import import_module, metadata
from typing import Any

from tokengrove.errors import ConfigurationError

_AGAIN = "pip install --force-reinstall --no-deps tokengrove"


def server_part(name: str) -> Any:
    """Import a module of the server. Raises ConfigurationError, with the name of a conflicting package."""
    check_server()
    return import_module(f"proxy.{name}")


def check_server() -> None:
    """Raise ConfigurationError unless the package `proxy` is the server."""
    try:
        found = import_module("proxy")
    except ImportError as error:
        raise ConfigurationError(f"the server is not installed ({error}): {_AGAIN}") from None
    if getattr(found, "SERVER", None) == "tokengrove":
        return
    others = sorted(set(metadata.packages_distributions().get("proxy", ())) - {"tokengrove"})
    place = getattr(found, "__file__", None)
    if place is None:  # the folder without its module: removing another package with this name also removed the module
        raise ConfigurationError(f"the server's package `proxy` is incomplete: {_AGAIN}")
    if others:
        way_out = f"pip uninstall {' '.join(others)}, then {_AGAIN}; or install tokengrove in an environment of its own"
        raise ConfigurationError(
            f"the package `proxy` of {' and '.join(others)} is in the way of the server's ({place}): {way_out}"
        )
    raise ConfigurationError(f"{place} is in the way of the server's package `proxy`: rename it, or {_AGAIN}")
