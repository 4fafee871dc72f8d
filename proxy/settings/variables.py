"""Settings from TOKENGROVE_* variables. An unknown variable is an error, since it would have no effect.

Kubernetes sets variables for each Service in the containers of its namespace. The variables of a Service with a name
that begins with `tokengrove` look like ours; `TOKENGROVE_PORT=tcp://10.0.0.1:80` even has the name of a setting. They
are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from proxy.settings.kinds import SETTINGS, did_you_mean, read_variable
from tokengrove.errors import ConfigurationError

VARIABLE_PREFIX = "TOKENGROVE_"
CONFIG_VARIABLE = "TOKENGROVE_CONFIG"
_OF_TESTS = "TOKENGROVE_TEST_"
_OF_SERVICES = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://.*")


def variable_of(name: str) -> str:
    """The variable of a setting."""
    return VARIABLE_PREFIX + name.upper()


def read_variables(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values of the settings with a nonempty variable. Raises ConfigurationError naming the variable."""
    values = {}
    for variable in sorted(environ):
        text = environ[variable]
        if not variable.startswith(VARIABLE_PREFIX) or text == "" or _is_of_others(variable, text):
            continue
        name = variable.removeprefix(VARIABLE_PREFIX).lower()
        if variable_of(name) != variable or name not in SETTINGS:
            raise ConfigurationError(_unknown(variable))
        values[name] = read_variable(variable, text, SETTINGS[name])
    return values


def _is_of_others(variable: str, text: str) -> bool:
    if variable == CONFIG_VARIABLE or variable.startswith(_OF_TESTS) or _OF_SERVICES.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(text) is not None


def _unknown(variable: str) -> str:
    near = did_you_mean(variable, [CONFIG_VARIABLE, *map(variable_of, SETTINGS)])
    return f"the variable {variable} is no setting{near or ';'} `tokengrove serve --help` lists the variables"
