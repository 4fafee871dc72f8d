"""The `tokengrove` command: its subcommands. A ConfigurationError becomes one line on stderr and exit code 1."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from proxy.commands.backup import import_
from proxy.commands.database import db_app
from proxy.commands.demo import demo
from proxy.commands.doctor import doctor
from proxy.commands.eval import eval_
from proxy.commands.export import export
from proxy.commands.failure import fail
from proxy.commands.harbor import harbor
from proxy.commands.rollout import RunCommand, rollout
from proxy.commands.serve import serve
from proxy.commands.show import ShowHelp, show
from proxy.commands.version import show_version
from proxy.commands.watch import watch
from proxy.errors import ConfigurationError

app = typer.Typer(
    name="tokengrove",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


class _PlainHelp(typer.core.TyperCommand):
    """Help without rich's table, which would cut the many long flags and variables at 80 columns."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})


def main() -> None:
    """Run the command that the arguments name."""
    try:
        app(prog_name="tokengrove")
    except ConfigurationError as error:
        fail(" ".join(str(error).split("\n")))


@app.callback()
def _tokengrove(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", is_eager=True, callback=show_version, help="Show the versions that bug reports need."
        ),
    ] = False,
) -> None:
    """Standalone rollout proxy for agentic reinforcement learning."""


app.command(cls=_PlainHelp)(serve)
app.command()(demo)
app.command()(doctor)
app.command()(export)
app.command(cls=RunCommand)(rollout)
app.command("eval", cls=RunCommand)(eval_)
app.command()(harbor)
app.command(cls=ShowHelp)(show)
app.command()(watch)
app.command("import")(import_)
app.add_typer(db_app, name="db")
