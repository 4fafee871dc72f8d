"""The commands of the server, for `tokengrove.commands`."""

from __future__ import annotations

from typing import Any

import typer
import typer.core

from proxy.commands.archive import archive_app
from proxy.commands.backup import import_
from proxy.commands.database import db_app
from proxy.commands.demo import demo
from proxy.commands.doctor import doctor
from proxy.commands.serve import serve

app = typer.Typer()


class _PlainHelp(typer.core.TyperCommand):
    """Help without rich's table, which would cut the many long flags and variables at 80 columns."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **{**named, "rich_markup_mode": None})


app.command(cls=_PlainHelp)(serve)
app.command()(demo)
app.command()(doctor)
app.command("import")(import_)
app.add_typer(archive_app, name="archive")
app.add_typer(db_app, name="db")
commands: Any = typer.main.get_group(app).commands
"""The commands of the server by name."""
