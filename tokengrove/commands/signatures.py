"""Decorators that give a command one flag for each field of a dataclass, so that typer lists and parses every field."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, get_origin, get_type_hints

import typer

from tokengrove.commands.export_flags import ExportFlags
from tokengrove.commands.run_flags import export_fields
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.run_options import RunOptions

Command = Callable[..., None]


def takes_export_flags(command: Command) -> Command:
    """Add a flag for each field of ExportFlags."""
    hints = get_type_hints(ExportFlags)
    return with_flags(command, [_export_flag(spec, hints[spec.name]) for spec in fields(ExportFlags)])


def takes_run_flags(command: Command) -> Command:
    """Add a flag for each field of RunOptions with a panel, of CommandOptions, and of ExportFlags if it fits a run.
    A flag that is not given is None: the configuration file or the default then applies.
    """
    hints, of_command, of_export = map(get_type_hints, (RunOptions, CommandOptions, ExportFlags))
    own = [_run_flag(spec, hints[spec.name]) for spec in fields(RunOptions) if "panel" in spec.metadata]
    commands = [_run_flag(spec, of_command[spec.name]) for spec in fields(CommandOptions)]
    exports = [_export_only_flag(spec, of_export[spec.name]) for spec in export_fields()]
    return with_flags(command, [*own, *commands, *exports])


def with_flags(command: Command, flags: Sequence[inspect.Parameter]) -> Command:
    """Replace `**flags` by these parameters in the signature and annotations, which typer reads."""
    own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [*(each for each in own if each.kind is not each.VAR_KEYWORD), *flags]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _export_flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    about = spec.metadata
    option = typer.Option(flag_name(spec), help=about["help"], rich_help_panel=about["panel"], **about["bounds"])
    return parameter(spec, kind, option, spec.default or None)


def _run_flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    about, kind = spec.metadata, tuple[str, ...] if get_origin(kind) is Mapping else kind
    bounds: dict[str, Any] = {name: bound for name, bound in about["bounds"].items() if kind in (int, int | None)}
    named: dict[str, Any] = {} if spec.name != "admin_key" else {"envvar": "TOKENGROVE_ADMIN_KEY"}
    text = about["help"] + _default_of_a_run(spec)
    option = typer.Option(
        flag_name(spec), help=text, rich_help_panel=about["panel"], show_default=False, **bounds, **named
    )
    return parameter(spec, kind, option, None)


def _default_of_a_run(spec: Field[Any]) -> str:
    """The default, where the help does not tell it."""
    if spec.default in (None, (), False) or spec.default is MISSING or "default" in spec.metadata["help"]:
        return ""
    return f" Default: {spec.default}."


def _export_only_flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    about = spec.metadata
    option = typer.Option(flag_name(spec), help=about["help"], rich_help_panel=about["panel"], **about["bounds"])
    return parameter(spec, kind, option, None)


def parameter(spec: Field[Any], kind: Any, option: Any, default: Any) -> inspect.Parameter:
    """A tuple is a flag that may be repeated."""
    parsed: Any = kind | None
    for each in (str, int):
        if kind == tuple[each, ...]:  # type: ignore[valid-type]
            parsed = list[each] | None  # type: ignore[valid-type]
    annotation = Annotated[parsed, option]
    return inspect.Parameter(spec.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag_name(spec: Field[Any]) -> str:
    """The flag of a field."""
    return f"--{spec.name.replace('_', '-')}"
