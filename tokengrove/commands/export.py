"""`tokengrove export`: exports training samples from a running server, or backs up a database."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from tokengrove.commands.database_flags import ConfigFile, DatabaseUrl
from tokengrove.commands.export_flags import export_body, takes_export_flags
from tokengrove.commands.failure import fail, fail_as
from tokengrove.errors import ConfigurationError, ProxyError
from tokengrove.options.option import flag_of
from tokengrove.server_part import server_part

Url = Annotated[str | None, typer.Option(help="URL of a running server: export training samples from it.")]
Key = Annotated[str | None, typer.Option(envvar="TOKENGROVE_ADMIN_KEY", help="Admin key of the server, if it has one.")]


@takes_export_flags
def export(
    everything: Annotated[bool, typer.Option("--all", help="Back up every session with all its stored data.")] = False,
    output: Annotated[
        str,
        typer.Option(
            "-o",
            "--output",
            help="With --all: file (.jsonl.zst or .jsonl), or - for stdout. With --url: a folder or a file.",
        ),
    ] = "-",
    database_url: DatabaseUrl = None,
    config: ConfigFile = None,
    url: Url = None,
    admin_key: Key = None,
    require_complete: Annotated[
        bool,
        typer.Option(
            "--require-complete", help="Exit with code 1 if a call is missing, nothing matches or is trained."
        ),
    ] = False,
    **flags: Any,
) -> None:
    """Export training samples from a server (--url), or back up a database (--all), which may be in use."""
    if everything == (url is not None):
        raise ConfigurationError(
            "give either --url URL (training samples from a server) or --all (backup of the database)"
        )
    _check_of_one_kind(
        url, {"database_url": database_url, "config": config}, {"require_complete": require_complete or None, **flags}
    )
    if url is None:
        server_part("commands.backup").back_up(output, database_url, config)
        return
    from tokengrove.client import export_files

    body = export_body(flags)
    try:
        name = export_files.format_of(output, body.pop("format", None))
        tally = export_files.export_files(url, admin_key, output, body, name)
    except ProxyError as error:
        fail_as(error, url)
    if require_complete and not tally.sessions:
        fail(tally.nothing)
    if require_complete and tally.incomplete:
        incomplete = f"{tally.incomplete} of {tally.sessions} sessions are incomplete"
        fail(f"{incomplete}: a call failed, was cut off or is still running")
    if require_complete and tally.uncounted is None and not tally.trained:
        counts = ", ".join(f"{count} {reason}" for reason, count in tally.untrained.most_common())
        fail(
            f"the export trains nothing: of {tally.sessions} sessions no token is trained ({counts or 'none sampled'})"
        )


def _check_of_one_kind(url: str | None, of_a_backup: dict[str, Any], of_samples: dict[str, Any]) -> None:
    """Raise ConfigurationError for a flag of the other kind of export: it would have no effect."""
    strays, kind = (of_samples, "--url") if url is None else (of_a_backup, "--all")
    for name, value in strays.items():
        if value is not None and value != []:
            raise ConfigurationError(f"{flag_of(name)} applies only with {kind}")
