"""Values in a text that a shell reads: it gets them as variables, so none of it is read as part of the script."""

from __future__ import annotations

import re
from collections.abc import Callable

from tokengrove.rollout.placeholder_names import PLACEHOLDER

_TOKEN = re.compile(rf"{PLACEHOLDER.pattern}|\\.|['\"\n]|(?<![^\s;&|(])#", re.DOTALL)
_NAME = "TOKENGROVE_VALUE_"


def with_variables(text: str, value: Callable[[re.Match[str]], str]) -> tuple[str, dict[str, str]]:
    """Return a script with `${...}` in place of its placeholders, and the variables that it needs.

    In single quotes, in which a shell puts in nothing, the quotes end before a value and begin again behind it. Without
    quotes a value is divided at its spaces, as every variable is. A here-document with a quoted delimiter gets none.
    """
    variables: dict[str, str] = {}
    inside = ""  # the quote, or the # of a comment, that what follows is in

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
    """What the text behind this quote, end of a line, escaped character or # is in."""
    if inside == "#":
        return "" if found == "\n" else inside
    if inside == "'":
        return "" if found.endswith("'") else inside  # a backslash is a character like any other there
    if found == inside:
        return ""
    return found if not inside and found in ("'", '"', "#") else inside
