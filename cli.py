"""The command line. Thin: flags become `Settings`, and every foreseen failure is one line and a non-zero exit."""

from __future__ import annotations

import inspect
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

from proxy.errors import ConfigurationError
from proxy.settings import VARIABLE_PREFIX, Settings, from_environment

if TYPE_CHECKING:
    from starlette.applications import Starlette

app = typer.Typer(
    name="tokengrove",
    help="Standalone rollout proxy for agentic reinforcement learning.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The `tokengrove` command."""
    try:
        app()
    except ConfigurationError as error:
        _fail(str(error))


def _fail(message: str) -> NoReturn:
    print(f"tokengrove: {message}", file=sys.stderr)
    sys.exit(1)


def serve(**flags: Any) -> None:
    """Serve a model to agents and record what they do. Without arguments: a tiny built-in model on 127.0.0.1:8080."""
    settings = from_environment(flags)
    from proxy import server

    server.run(settings, lambda served, url: _announce(served, url, settings))


def _announce(served: Starlette, url: str, settings: Settings) -> None:
    """What is served, where, with which database, and the next command to try."""
    info, renderer = served.state.engine.info(), served.state.renderer
    print(f"tokengrove serves {served.state.model} at {url}")
    print(f"  engine    {info.name}, weight version {info.weight_version}, context {info.context_length} tokens")
    if info.detail:
        print(f"            {info.detail}")
    print(f"  renderer  {renderer.family}, encoding with {renderer.encoder}")
    print(f"  database  {served.state.store.label}")
    access = "admin key needed" if settings.admin_key else "open: any key or none, on this machine only"
    print(f"  access    {access}")
    print(
        "  try       curl -s "
        + url
        + """/try-1/v1/chat/completions -d '{"model": "any", "max_tokens": 32, """
        + """"messages": [{"role": "user", "content": "hello"}]}'"""
    )
    print("            curl -s " + url + """/export_trajectories -d '{"session_id": "try-1"}'""", flush=True)


def demo() -> None:
    """Run two short agents against the built-in model, reward them, export, and show the trees and samples."""
    from rich.console import Console

    from proxy import server
    from proxy.rollout.demo import run_demo

    with tempfile.TemporaryDirectory(prefix="tokengrove-demo-") as folder:
        database = Path(folder) / "demo.db"
        settings = Settings(port=0, database_url=f"sqlite:///{database}", log_level="warning")
        with server.serving(settings) as url:
            run_demo(url, Console())


def doctor(
    model: Annotated[str | None, typer.Option(help="Folder of the model; none: the tiny built-in one.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Folder of the tokenizer, if it is another.")] = None,
    family: Annotated[str | None, typer.Option(help="Renderer family.")] = None,
    tool_parser: Annotated[str | None, typer.Option(help="Tool-call format.")] = None,
    reasoning_parser: Annotated[str | None, typer.Option(help="Reasoning format.")] = None,
) -> None:
    """Try a model's tokenizer and chat template, without its weights: what is bridged, parsed, forked or refused."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from proxy.app import examine_model

    given = {"model": model, "tokenizer": tokenizer, "family": family}
    settings = from_environment({**given, "tool_parser": tool_parser, "reasoning_parser": reasoning_parser})
    found = examine_model(settings)
    console = Console()
    for name, value in found.facts:
        console.print(f"{name:12}{value}", markup=False, highlight=False, soft_wrap=True)
    table = Table("conversation", "", "what was found")
    for check in found.checks:
        style = {"breaks": "red", "forks": "yellow", "refused": "dim"}.get(check.verdict, "green")
        table.add_row(Text(check.name), Text(check.verdict, style), Text(check.detail))
    console.print(table)
    if found.broken:
        raise typer.Exit(1)


def _settings_signature() -> inspect.Signature:
    """One flag for each field of Settings; None means not given, so that a variable or the default holds."""
    hints = get_type_hints(Settings)
    parameters = []
    for spec in fields(Settings):
        name = f"--{spec.name.replace('_', '-')}"
        text = f"{spec.metadata['help']} [{VARIABLE_PREFIX}{spec.name.upper()}; default: {_default_text(spec.default)}]"
        kind: Any = hints[spec.name]
        if kind in (bool, bool | None):
            option = typer.Option(f"{name}/--no-{spec.name.replace('_', '-')}", help=text, show_default=False)
            kind = bool | None
        elif kind == tuple[str, ...]:
            option, kind = typer.Option(name, help=text, show_default=False), list[str] | None
        else:
            option, kind = typer.Option(name, help=text, show_default=False), kind | None
        parameters.append(
            inspect.Parameter(
                spec.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
            )
        )
    return inspect.Signature(parameters)


def _default_text(value: Any) -> str:
    return "none" if value in (None, ()) else str(value)


def _command(function: Any, signature: inspect.Signature | None = None) -> None:
    if signature is not None:
        function.__signature__ = signature
        function.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    app.command()(function)


_command(serve, _settings_signature())
_command(demo)
_command(doctor)


if __name__ == "__main__":
    main()
