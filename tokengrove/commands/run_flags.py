"""The flags of `tokengrove rollout` and `eval`: one for each field of `RunOptions`, of the export and of commands.

A flag that is not given is None. Then the value in the file of `--config`, or the default, applies.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from tokengrove.commands.export_flags import export_body, run_export_flags
from tokengrove.commands.signatures import Command, flag_parameter, with_flags
from tokengrove.errors import ConfigurationError
from tokengrove.options.option import Option, options_of
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.run_options import RunOptions

_RUN, _COMMAND = options_of(RunOptions), options_of(CommandOptions)


def takes_run_flags(command: Command) -> Command:
    """Add a flag for each option with a panel of a run, each option of a command, and each export option of runs."""
    run = [_run_flag(option) for option in _RUN.values() if "panel" in option.about]
    commands = [flag_parameter(option) for option in _COMMAND.values()]
    return with_flags(command, [*run, *commands, *run_export_flags().values()])


def _run_flag(option: Option) -> inspect.Parameter:
    variable = "TOKENGROVE_ADMIN_KEY" if option.name == "admin_key" else None
    return flag_parameter(option, envvar=variable)


def named_values(flag: str, given: Sequence[str]) -> dict[str, Any]:
    """The values of a repeatable flag NAME=VALUE; VALUE is JSON, else text. Raises ConfigurationError."""
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


def run_options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The run options of the given flags, by the names of `RunOptions`. Raises ConfigurationError."""
    given = _given(flags)
    options: dict[str, Any] = {}
    for name in given.keys() & _RUN.keys():
        value = given[name]
        if get_origin(_RUN[name].kind) is Mapping:
            options[name] = named_values(_RUN[name].flag, value)
        else:
            options[name] = tuple(value) if isinstance(value, list) else value
    if export := export_body({name: given[name] for name in given.keys() & run_export_flags().keys()}):
        options["export"] = export
    return options


def command_options_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The command options of the given flags, by the names of `CommandOptions`. Raises ConfigurationError."""
    given = {name: value for name, value in _given(flags).items() if name in _COMMAND}
    for name, value in given.items():
        if get_origin(_COMMAND[name].kind) is Mapping:
            option = _COMMAND[name]
            of_json = get_args(option.kind)[1] is Any
            texts = (_named_text(option.flag, text) for text in value)
            given[name] = named_values(option.flag, value) if of_json else dict(texts)
    return given


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None and value != []}


def _named_text(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ConfigurationError(f"{flag} {text} is not valid; give NAME=VALUE")
    return name, value
