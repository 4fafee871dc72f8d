"""`tokengrove export`: samples of a running server, or a backup of a database."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer

from proxy.commands.backup import back_up
from proxy.commands.database_url import DatabaseUrl
from proxy.commands.export_flags import ExportFlags
from proxy.commands.failure import fail
from proxy.commands.signatures import takes_export_flags
from proxy.errors import ConfigurationError, ProxyError

Url = Annotated[str | None, typer.Option(help="A running server: export samples for training from it.")]
Key = Annotated[str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="The server's admin key, if it has one.")]


@takes_export_flags
def export(
    everything: Annotated[bool, typer.Option("--all", help="Every session, with all that is stored of it.")] = False,
    output: Annotated[
        str, typer.Option("-o", "--output", help="File (.jsonl.zst or .jsonl) or -; with --url a folder.")
    ] = "-",
    database_url: DatabaseUrl = None,
    url: Url = None,
    admin_key: Key = None,
    require_complete: Annotated[
        bool, typer.Option("--require-complete", help="Exit code 1 when a session lacks calls.")
    ] = False,
    **flags: Any,
) -> None:
    """Write samples for training from a server (--url), or a backup of a database (--all) that may be in use."""
    if everything == (url is not None):
        raise ConfigurationError("give --url URL for samples to train on, or --all for a backup of the database")
    _check_of_one_kind(url, {"database_url": database_url}, {"require_complete": require_complete or None, **flags})
    if url is None:
        back_up(output, database_url)
        return
    from proxy.client import export_files

    body = ExportFlags(**{name: value for name, value in flags.items() if value is not None}).body()
    try:
        tally = export_files.export_files(url, admin_key, output, body, body.pop("format"))
    except ProxyError as error:
        fail(f"{url}: {error.message}")
    if require_complete and tally.incomplete:
        fail(f"{tally.incomplete} of {tally.sessions} sessions are incomplete: a call failed, was cut or has not ended")


def _check_of_one_kind(url: str | None, of_a_backup: dict[str, Any], of_samples: dict[str, Any]) -> None:
    """Raise ConfigurationError for a flag that goes with the other kind of export, and would do nothing here."""
    defaults = {spec.name: spec.default or None for spec in fields(ExportFlags)}
    strays, kind = (of_samples, "--url") if url is None else (of_a_backup, "--all")
    for name, value in strays.items():
        if value is not None and value != defaults.get(name):
            raise ConfigurationError(f"--{name.replace('_', '-')} goes with {kind}: it says nothing of this export")
