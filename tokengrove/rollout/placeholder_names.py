"""The names of a command's placeholders, and a check for misspelt names, which would reach an agent unfilled."""

from __future__ import annotations

import re
from difflib import get_close_matches

from tokengrove.errors import ConfigurationError

NAMES = (
    *("prompt", "task_id", "session_id", "sample", "seed", "model", "base_url", "root_url", "api_key"),
    *("workdir", "home", "container"),
)
"""The placeholders, in addition to `{data.FIELD}` for a field of the task and `{data.FIELD.FIELD}` for a nested field.
"""
PLACEHOLDER = re.compile(rf"\{{(?:({'|'.join(NAMES)})|data\.([\w.-]+))\}}")
_MISSPELT = re.compile(r"(?<!\$)\{([a-z_]{4,})\}")
_OF_PREFIXES = ("variables", "command")


def has_placeholders(text: str) -> bool:
    """Whether a text differs between episodes."""
    return PLACEHOLDER.search(text) is not None


def check_placeholders(text: str, where: str) -> None:
    """Raise ConfigurationError for a misspelt placeholder. `where`: the flag, for the message."""
    for name in _MISSPELT.findall(text):
        near = get_close_matches(name, NAMES, 1, cutoff=0.8)
        if near and name not in (*NAMES, *_OF_PREFIXES):
            raise ConfigurationError(f"{where}: {{{name}}} is not a placeholder; did you mean {{{near[0]}}}?")
