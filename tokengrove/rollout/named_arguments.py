"""Arguments by name: a user's function gets the arguments that its signature names.

A function is refused if it has a parameter that cannot be filled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tokengrove.errors import InvalidRequest

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a function; `**kwargs` if the function has no signature."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function in C
        return [inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD)]


def wanted(function: Callable[..., Any], known: Collection[str]) -> list[str]:
    """The known names that the function accepts; all of them if it has `**kwargs`."""
    listed = parameters(function)
    if any(each.kind is each.VAR_KEYWORD for each in listed):
        return list(known)
    return [each.name for each in listed if each.kind in _BY_NAME and each.name in known]


def unknown(function: Callable[..., Any], known: Collection[str]) -> list[str]:
    """The parameters without a default that no known name fills."""
    required = [each for each in parameters(function) if each.default is each.empty]
    positional = [each.name for each in required if each.kind is each.POSITIONAL_ONLY]
    return [*positional, *(each.name for each in required if each.kind in _BY_NAME and each.name not in known)]


def check_arguments(called: Callable[..., Any], arguments: Mapping[str, Any], who: str) -> None:
    """Raise InvalidRequest for an argument that `called` does not accept. The message lists the accepted arguments."""
    listed = parameters(called)
    if any(each.kind is each.VAR_KEYWORD for each in listed):
        return
    names = [each.name for each in listed if each.kind in _BY_NAME]
    if wrong := sorted(arguments.keys() - set(names)):
        takes = ", ".join(name for name in names if name != "self") or "none"
        raise InvalidRequest(f"{who} takes no argument {wrong[0]!r}; it takes {takes}", param=wrong[0])


def check_construction(called: type, arguments: Mapping[str, Any], who: str) -> None:
    """Like `check_arguments`, and raise InvalidRequest for a missing argument."""
    check_arguments(called, arguments, who)
    if missing := unknown(called, arguments):
        raise InvalidRequest(f"{who} needs the argument {missing[0]!r}", param=missing[0])
