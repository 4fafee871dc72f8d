"""The flags of `tokengrove rollout` and `eval`: one for each field of `RunOptions`, of the export and of commands.

A flag that is not given is None: the value of the file of `--config`, or the default, then applies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, get_origin, get_type_hints

from tokengrove.commands.export_flags import ExportFlags
from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.run_options import RunOptions

EXPORT_PANELS = ("How samples are made", "What is trained", "Layout padded")
"""The panels of `tokengrove export` whose flags apply here: which sessions are exported is the run's matter."""

_OF_SESSIONS = ("discount", "credit")
"""Fields of an export that a run gives to its sessions (`--session discount=0.9`), so that all exports agree."""


def export_fields() -> list[Field[Any]]:
    """The flags of an export that `rollout` and `eval` have, too."""
    return [
        spec
        for spec in fields(ExportFlags)
        if spec.metadata["panel"] in EXPORT_PANELS and spec.name not in _OF_SESSIONS
    ]


def export_body(given: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the export that flags ask for; empty without flags. Raises ConfigurationError."""
    chosen: dict[str, Any] = {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    if not chosen:
        return {}
    body = ExportFlags(**chosen).body()
    if "layout" not in chosen:
        del body["layout"]
    return body


def named_values(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE of a repeatable flag; VALUE is JSON, else text. Raises ConfigurationError."""
    values: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"{flag} {text} is not valid; give NAME=VALUE")
        if name in values:
            raise ConfigurationError(f"{flag} {name} is given twice")
        values[name] = _json(value)
    return values


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options that flags give, by the names of `RunOptions`. Raises ConfigurationError."""
    given = {name: value for name, value in flags.items() if value is not None and value != []}
    hints, of_export = get_type_hints(RunOptions), {spec.name for spec in export_fields()}
    options: dict[str, Any] = {}
    for name in given.keys() & hints.keys():
        value = given[name]
        if get_origin(hints[name]) is Mapping:
            options[name] = named_values(f"--{name.replace('_', '-')}", value)
        else:
            options[name] = tuple(value) if isinstance(value, list) else value
    if export := export_body({name: given[name] for name in given.keys() & of_export}):
        options["export"] = export
    return options


def command_options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a command that flags give, by the names of `CommandOptions`. Raises ConfigurationError."""
    hints = get_type_hints(CommandOptions)
    given = {name: value for name, value in flags.items() if name in hints and value is not None and value != []}
    for name, value in given.items():
        if get_origin(hints[name]) is Mapping:
            given[name] = dict(_named_text(f"--{name.replace('_', '-')}", text) for text in value)
    return given


def _named_text(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"{flag} {text} is not valid; give NAME=VALUE")
    return name, value
