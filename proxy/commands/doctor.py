"""`tokengrove doctor`: check a model's tokenizer and chat template, and what engine servers can do."""

from __future__ import annotations

import dataclasses
import json
import logging
from typing import TYPE_CHECKING, Annotated

import typer

from proxy.progress import show_steps, warn
from proxy.settings.sources import read_sources
from tokengrove.commands.database_flags import ConfigFile
from tokengrove.errors import ConfigurationError

if TYPE_CHECKING:
    from proxy.engine.servers.examination import ServerFindings
    from proxy.rendering.examination import Examination
    from proxy.settings import Settings


def doctor(
    model: Annotated[
        str | None, typer.Option(help="Folder, or ORG/NAME[@REVISION] on the hub (default: the tiny model).")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Tokenizer, named like a model (default: the model's).")] = None,
    family: Annotated[str | None, typer.Option(help="Renderer family.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Tool-call format.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Reasoning format.")] = None,
    engine: Annotated[
        str | None,
        typer.Option(metavar="URL[,URL]", help="Engine servers to examine, and to compare with the model."),
    ] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="KEY=VALUE for the servers, as for serve, such as api_key=KEY. Repeatable.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each server, and one for the model.")
    ] = False,
    config: ConfigFile = None,
) -> None:
    """Check a model's tokenizer and chat template without its weights: what is joined, parsed, forked or refused.

    With URLs in --engine, tell what answers there and what it can do; the model is then checked only if it is named.
    Ends with 1 if something breaks or a server cannot be used.
    """
    given = {"model": model, "tokenizer": tokenizer, "family": family}
    given |= {"tool_parser": tool_parser, "reasoning_parser": reasoning_parser}
    asked = {"engine": engine, "engine_arg": engine_arg or None}
    sources = read_sources({**given, **asked}, config=config, only=(*given, *asked, "thinking_retention"))
    if engine is not None and "//" not in engine:
        raise ConfigurationError(f"--engine {engine}: doctor examines engine servers; give http://HOST:PORT")
    show_steps()
    warn(sources.warning)
    with sources.named():
        if "//" in sources.settings.engine:
            good = _examine_servers(sources.settings, as_json=as_json)
        else:
            good = _examine_model(sources.settings, as_json=as_json)
    if not good:
        raise typer.Exit(1)


def _examine_model(settings: Settings, *, as_json: bool) -> bool:
    """Print the findings about the model of `settings`; return False if something breaks."""
    from proxy.app import examine_model

    found = examine_model(settings)
    _print_model(found, as_json=as_json)
    return not found.broken


def _examine_servers(settings: Settings, *, as_json: bool) -> bool:
    """Print the findings about the servers of `settings`, and about its model, if any; return False if one is bad."""
    from proxy.app import examine_servers

    logging.getLogger("proxy.engine").addHandler(logging.NullHandler())  # the findings say what it would warn of
    servers, model = examine_servers(settings)
    for found in servers:
        _print_server(found, as_json=as_json)
    if model is not None:
        _print_model(model, as_json=as_json)
    return not any(found.problem for found in servers) and not (model is not None and model.broken)


def _print_server(found: ServerFindings, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"url": found.url, "usable": not found.problem, **dataclasses.asdict(found)}))
        return
    told = {"server": found.url, "usable": f"no: {found.problem}" if found.problem else "yes", **found.facts}
    for name, value in told.items():
        for line in [value] if isinstance(value, str) else value or ["nothing"]:
            _print_fact(name, line)
    print()


def _print_model(found: Examination, *, as_json: bool) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if as_json:
        print(json.dumps({"facts": dict(found.facts), "checks": [dataclasses.asdict(check) for check in found.checks]}))
        return
    for name, value in found.facts:
        _print_fact(name, value)
    table = Table("conversation", "verdict", "finding")
    for check in found.checks:
        style = {"breaks": "red", "forks": "yellow", "refused": "dim"}.get(check.verdict, "green")
        table.add_row(Text(check.name), Text(check.verdict, style), Text(check.detail))
    Console().print(table)


def _print_fact(name: str, value: str) -> None:
    print(f"{name:12}{value}")
