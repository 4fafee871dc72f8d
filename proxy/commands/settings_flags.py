"""A flag for each field of `Settings`, with its variable and its default."""

from __future__ import annotations

import inspect
from dataclasses import Field, fields
from typing import Any, get_type_hints

import typer

from proxy.settings import Settings
from proxy.settings.variables import variable_of
from tokengrove.commands.signatures import Command, flag_name, parameter, with_flags


def takes_settings(command: Command) -> Command:
    """Add a flag for each field of Settings. A flag that is not given is None: its variable or default then applies."""
    hints = get_type_hints(Settings)
    return with_flags(command, [_flag(spec, hints[spec.name]) for spec in fields(Settings)])


def _flag(spec: Field[Any], kind: Any) -> inspect.Parameter:
    text = f"{spec.metadata['help']} [{variable_of(spec.name)}; default: {_default_text(spec.default)}]"
    name = flag_name(spec)
    if kind in (bool, bool | None):
        name = f"{name}/--no-{name.removeprefix('--')}"
    return parameter(spec, kind, typer.Option(name, help=text, show_default=False), None)


def _default_text(value: Any) -> str:
    return "none" if value in (None, ()) else str(value)
