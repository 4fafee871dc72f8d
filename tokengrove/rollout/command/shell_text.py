"""Passes values to a shell script as variables, so that the shell does not interpret any part of them as script."""

from __future__ import annotations

import re
from collections.abc import Callable

from tokengrove.rollout.placeholder_names import PLACEHOLDER

_TOKEN = re.compile(rf"{PLACEHOLDER.pattern}|\\.|['\"\n]|(?<![^\s;&|(])#", re.DOTALL)
_NAME = "TOKENGROVE_VALUE_"


def with_variables(text: str, value: Callable[[re.Match[str]], str]) -> tuple[str, dict[str, str]]:
    """Return a script with `${...}` in place of its placeholders, and the variables that it needs.

    In single quotes, where a shell expands nothing, the quotes are closed before a value and opened again after it.
    Without quotes, the shell splits a value at white space, like every variable. In a here-document with a quoted
    delimiter, values are not expanded.
    """
    variables: dict[str, str] = {}
    inside = ""  # the quote, or the # of a comment, that the following text is in

    def part(match: re.Match[str]) -> str:
        nonlocal inside
        found = match[0]
        if found.startswith("{"):
            name = f"{_NAME}{len(variables)}"
            variables[name] = value(match)
            return f"""'"${{{name}}}"'""" if inside == "'" else f"${{{name}}}"
        inside = _after(inside, found)
        return found

    return _TOKEN.sub(part, text), variables


def _after(inside: str, found: str) -> str:
    """The quote or comment that the text after this quote, line end, escaped character or # is in."""
    if inside == "#":
        return "" if found == "\n" else inside
    if inside == "'":
        return "" if found.endswith("'") else inside  # a backslash has no special meaning here
    if found == inside:
        return ""
    return found if not inside and found in ("'", '"', "#") else inside
