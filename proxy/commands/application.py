"""The `tokengrove` command: its subcommands, and what becomes of a configuration error."""

from __future__ import annotations

import inspect
from typing import Any

import typer
import typer.core

from proxy.commands.backup import import_
from proxy.commands.database import db_app
from proxy.commands.demo import demo
from proxy.commands.doctor import doctor
from proxy.commands.export import export
from proxy.commands.failure import fail
from proxy.commands.serve import serve
from proxy.commands.signatures import export_signature, settings_signature
from proxy.errors import ConfigurationError

app = typer.Typer(
    name="tokengrove",
    help="Standalone rollout proxy for agentic reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class _PlainHelp(typer.core.TyperCommand):
    """Help as a list: a table of so many long flags and variables would cut their names at 80 columns."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})


def main() -> None:
    """The `tokengrove` command."""
    try:
        app()
    except ConfigurationError as error:
        fail(str(error))


def _command(
    function: Any,
    signature: inspect.Signature | None = None,
    name: str | None = None,
    kind: type[typer.core.TyperCommand] | None = None,
) -> None:
    if signature is not None:
        function.__signature__ = signature
        function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    app.command(name, cls=kind)(function)


_command(serve, settings_signature(), kind=_PlainHelp)
_command(demo)
_command(doctor)
_command(export, export_signature(export))
_command(import_, name="import")
app.add_typer(db_app, name="db")
