"""The settings of one server, and where they come from."""

from proxy.settings.checks import listed
from proxy.settings.settings import Settings
from proxy.settings.sources import read_settings
from proxy.settings.variables import VARIABLE_PREFIX

__all__ = ["VARIABLE_PREFIX", "Settings", "listed", "read_settings"]
