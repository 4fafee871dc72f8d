"""The flag --database-url, which several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.settings import from_environment

DatabaseUrl = Annotated[
    str | None, typer.Option("--database-url", help="The database [TOKENGROVE_DATABASE_URL; sqlite:///tokengrove.db].")
]


def database_url_of(given: str | None) -> str:
    """Return the given URL, else that of the environment, else the default."""
    return from_environment({"database_url": given}).database_url
