"""Signatures of commands whose flags are the fields of a dataclass, so that typer shows and parses each of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from proxy.commands.export_flags import ExportFlags
from proxy.settings import VARIABLE_PREFIX, Settings


def export_signature(command: Callable[..., None]) -> inspect.Signature:
    """The flags of the command itself, and one for each field of ExportFlags."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    hints, parameters = get_type_hints(ExportFlags), []
    for spec in fields(ExportFlags):
        about, default = spec.metadata, spec.default or None
        kind: Any = list[str] | None if hints[spec.name] == tuple[str, ...] else hints[spec.name] | None
        name = f"--{spec.name.replace('_', '-')}"
        option = typer.Option(name, help=about["help"], rich_help_panel=about["panel"], **about["bounds"])
        kept = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(spec.name, kept, default=default, annotation=Annotated[kind, option]))
    return inspect.Signature([*(each for each in own if each.kind is not each.VAR_KEYWORD), *parameters])


def settings_signature() -> inspect.Signature:
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
