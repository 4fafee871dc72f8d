"""The flag that says which database a command works on."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.settings import from_environment

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database [TOKENGROVE_DATABASE_URL; sqlite:///tokengrove.db].")
]


def database_url_of(given: str | None) -> str:
    """The URL that was given, else the environment's, else the default."""
    return from_environment({"database_url": given}).database_url
