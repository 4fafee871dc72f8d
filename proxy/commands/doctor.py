"""`tokengrove doctor`: check which conversations a model's tokenizer and chat template support."""

from __future__ import annotations

from typing import Annotated

import typer

from proxy.progress import show_steps, warn
from proxy.settings.sources import read_sources
from tokengrove.commands.database_flags import ConfigFile


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Folder, or ORG/NAME[@REVISION] on the hub (default: the tiny model).")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, named like a model (default: the model's).")] = None,
    family: Annotated[str | None, typer.Option(help="Renderer family.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Tool-call format.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Reasoning format.")] = None,
    config: ConfigFile = None,
) -> None:
    """Check a model's tokenizer and chat template without its weights: what is joined, parsed, forked or refused."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from proxy.app import examine_model

    given = {"model": model, "tokenizer": tokenizer, "family": family}
    given |= {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    sources = read_sources(given, config=config, only=(*given, "thinking_retention"))
    show_steps()
    warn(sources.warning)
    with sources.named():
        found = examine_model(sources.settings)
    console = Console()
    for name, value in found.facts:
        console.print(f"{name:12}{value}", markup=False, highlight=False, soft_wrap=True)
    table = Table("conversation", "verdict", "finding")
    for check in found.checks:
        style = {"breaks": "red", "forks": "yellow", "refused": "dim"}.get(check.verdict, "green")
        table.add_row(Text(check.name), Text(check.verdict, style), Text(check.detail))
    console.print(table)
    if found.broken:
        raise typer.Exit(1)
