"""The database that a command uses."""

from __future__ import annotations

from pathlib import Path

from proxy.progress import warn
from proxy.settings.sources import read_sources


def database_url_of(given: str | None, config: Path | None) -> str:
    """Return the given URL, else the URL of the environment, of the configuration file, or the default."""
    sources = read_sources({"database_url": given}, config=config, only=("database_url",))
    warn(sources.warning)
    return sources.settings.database_url
