"""The flags --database-url and --config, which several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from proxy.progress import warn
from proxy.settings.sources import read_sources

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database [TOKENGROVE_DATABASE_URL; sqlite:///tokengrove.db].")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings, as `serve` takes it [TOKENGROVE_CONFIG].")
]


def database_url_of(given: str | None, config: Path | None) -> str:
    """Return the given URL, else that of the environment, of the configuration file, or the default."""
    sources = read_sources({"database_url": given}, config=config, only=("database_url",))
    warn(sources.warning)
    return sources.settings.database_url
