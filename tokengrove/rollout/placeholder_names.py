"""The placeholders of a command by name, and what is nearly one: a misspelt one should not reach an agent."""

from __future__ import annotations

import re
from difflib import get_close_matches

from tokengrove.errors import ConfigurationError

NAMES = (
    *("prompt", "task_id", "session_id", "sample", "seed", "model", "base_url", "root_url", "api_key"),
    *("workdir", "home", "container"),
)
"""The placeholders, beside `{data.FIELD}`: a field of the task, or `{data.FIELD.FIELD}` inside of one."""
PLACEHOLDER = re.compile(rf"\{{(?:({'|'.join(NAMES)})|data\.([\w.-]+))\}}")
_MISSPELT = re.compile(r"(?<!\$)\{([a-z_]{4,})\}")
_OF_PREFIXES = ("variables", "command")


def has_placeholders(text: str) -> bool:
    """Whether a text says something else in each episode."""
    return PLACEHOLDER.search(text) is not None


def check_placeholders(text: str, where: str) -> None:
    """Raise ConfigurationError for what is nearly a placeholder."""
    for name in _MISSPELT.findall(text):
        near = get_close_matches(name, NAMES, 1, cutoff=0.8)
        if near and name not in (*NAMES, *_OF_PREFIXES):
            raise ConfigurationError(f"{where}: {{{name}}} is no placeholder; did you mean {{{near[0]}}}?")
