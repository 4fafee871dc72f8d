"""The settings of one server, and where they come from."""

from proxy.settings.checks import listed
from proxy.settings.settings import Settings
from proxy.settings.variables import VARIABLE_PREFIX, from_environment

__all__ = ["VARIABLE_PREFIX", "Settings", "from_environment", "listed"]
