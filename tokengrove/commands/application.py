"""The `tokengrove` command with its subcommands. A ConfigurationError becomes one line on stderr and exit code 1.

The server's commands are in `proxy.commands`, and are imported on use: the other commands work even if `proxy` is a
different package.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
import typer.core

from tokengrove.commands.eval import eval_
from tokengrove.commands.export import export
from tokengrove.commands.failure import fail
from tokengrove.commands.harbor import harbor
from tokengrove.commands.plain_help import PlainHelp
from tokengrove.commands.rollout import RunCommand, rollout
from tokengrove.commands.score import score
from tokengrove.commands.show import ShowHelp, show
from tokengrove.commands.version import show_version
from tokengrove.commands.watch import watch
from tokengrove.errors import ConfigurationError
from tokengrove.server_part import server_part

_OF_THE_SERVER = ("serve", "demo", "doctor", "import", "archive", "db")
_ORDER = (
    "serve",
    "demo",
    "doctor",
    "export",
    "rollout",
    "eval",
    "harbor",
    "score",
    "show",
    "watch",
    "import",
    "archive",
    "db",
)


class _Commands(typer.core.TyperGroup):
    """The commands of this package, and those of the server if it is installed."""

    def list_commands(self, ctx: Any) -> list[str]:  # typer's own copy of click has these types
        return list(_ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _OF_THE_SERVER:
            return super().get_command(ctx, cmd_name)
        try:
            part = server_part("commands.application")
        except ConfigurationError as error:
            return _without_server(cmd_name, error)
        return part.commands[cmd_name]


def _without_server(name: str, error: ConfigurationError) -> Any:
    """A command that fails with the reason why the server is not available, whatever its arguments."""
    lone = typer.Typer(rich_markup_mode=None)

    @lone.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def refused(_: typer.Context) -> None:
        raise error

    refused.__doc__ = f"Not available: {error}"
    command: Any = typer.main.get_command(lone)
    command.help = f"Not available: {error}"
    return command


app = typer.Typer(
    name="tokengrove",
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command in the arguments."""
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


app.command(cls=PlainHelp)(export)
app.command(cls=RunCommand)(rollout)
app.command("eval", cls=RunCommand)(eval_)
app.command(cls=PlainHelp)(harbor)
app.command(cls=PlainHelp)(score)
app.command(cls=ShowHelp)(show)
app.command(cls=PlainHelp)(watch)
