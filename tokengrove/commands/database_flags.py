"""The flags --database-url and --config, shared by several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database [TOKENGROVE_DATABASE_URL; sqlite:///tokengrove.db].")
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="TOML file with settings, as `serve` takes it [TOKENGROVE_CONFIG].")
]
