"""A flag for each setting, with its variable and its default."""

from __future__ import annotations

import inspect

from proxy.settings import Settings
from proxy.settings.variables import variable_of
from tokengrove.commands.signatures import Command, flag_parameter, with_flags
from tokengrove.options.option import Option, options_of


def takes_settings(command: Command) -> Command:
    """Add a flag for each setting. A flag that is not given is None, so that its variable or default applies."""
    return with_flags(command, [_flag(setting) for setting in options_of(Settings).values()])


def _flag(setting: Option) -> inspect.Parameter:
    default = "none" if setting.default in (None, ()) else str(setting.default)
    text = f"{setting.help} [{variable_of(setting.name)}; default: {default}]"
    # Settings checks bounds: its errors name the variable or the place in the file that a value comes from.
    return flag_parameter(setting, help=text, negated=True, bounded=False)
