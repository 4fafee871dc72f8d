"""The commands of the server, for `tokengrove.commands`."""

from __future__ import annotations

from typing import Any

import typer

from proxy.commands.archive import archive_app
from proxy.commands.backup import import_
from proxy.commands.database import db_app
from proxy.commands.demo import demo
from proxy.commands.doctor import doctor
from proxy.commands.serve import serve
from tokengrove.commands.plain_help import PlainHelp

app = typer.Typer(rich_markup_mode=None)


app.command(cls=PlainHelp)(serve)
app.command(cls=PlainHelp)(demo)
app.command(cls=PlainHelp)(doctor)
app.command("import", cls=PlainHelp)(import_)
app.add_typer(archive_app, name="archive")
app.add_typer(db_app, name="db")
commands: Any = typer.main.get_group(app).commands
"""The commands of the server by name."""
