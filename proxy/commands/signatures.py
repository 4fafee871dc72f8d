"""Decorators that give a command one flag for each field of a dataclass, so that typer lists and parses every field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Annotated, Any, get_type_hints

import typer

from proxy.commands.export_flags import ExportFlags
from proxy.settings import Settings
from proxy.settings.variables import variable_of

Command = Callable[..., None]


def takes_settings(command: Command) -> Command:
    """Add a flag for each field of Settings. A flag that is not given is None: its variable or default then applies."""
    hints = get_type_hints(Settings)
    return _with_flags(command, [_settings_flag(spec, hints[spec.name]) for spec in fields(Settings)])


def takes_export_flags(command: Command) -> Command:
    """Add a flag for each field of ExportFlags."""
    hints = get_type_hints(ExportFlags)
    return _with_flags(command, [_export_flag(spec, hints[spec.name]) for spec in fields(ExportFlags)])


def _with_flags(command: Command, flags: Sequence[inspect.Parameter]) -> Command:
    """Replace `**flags` by these parameters in the signature and annotations, which typer reads."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(each for each in own if each.kind is not each.VAR_KEYWORD), *flags]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _settings_flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    text = f"{spec.metadata['help']} [{variable_of(spec.name)}; default: {_default_text(spec.default)}]"
    name = _flag_name(spec)
    if kind in (bool, bool | None):
        name = f"{name}/--no-{name.removeprefix('--')}"
    return _parameter(spec, kind, typer.Option(name, help=text, show_default=False), None)


def _export_flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    about = spec.metadata
    option = typer.Option(_flag_name(spec), help=about["help"], rich_help_panel=about["panel"], **about["bounds"])
    return _parameter(spec, kind, option, spec.default or None)


def _parameter(spec: Field[Any], kind: Any, option: Any, default: Any) -> inspect.Parameter:
    """A tuple is a flag that may be repeated."""
    parsed: Any = list[str] | None if kind == tuple[str, ...] else kind | None
    annotation = Annotated[parsed, option]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag_name(spec: Field[Any]) -> str:
    return f"--{spec.name.replace('_', '-')}"


def _default_text(value: Any) -> str:
    return "none" if value in (None, ()) else str(value)
