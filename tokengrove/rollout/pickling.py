"""Checks that values for another process can be pickled, and finds the part that cannot."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

_DEEPEST = 5


def check_picklable(name: str, value: Any) -> None:
    """Raise TypeError if `value` cannot be pickled. The message names the attribute or item that is the cause.

    `name`: the name of the value in the message, such as `agent`.
    """
    if (error := _refusal(value)) is not None:
        path, cause = _cause(name, value, error, _DEEPEST)
        raise TypeError(
            f"{path} cannot be sent to another process, because it cannot be pickled "
            f"({type(cause).__name__}: {cause}); create it inside the function that uses it"
        ) from cause


def _refusal(value: Any) -> Exception | None:
    try:
        pickle.dumps(value)
    except Exception as error:  # pickle and the methods that it calls may raise any exception
        return error
    return None


def _cause(path: str, value: Any, error: Exception, deepest: int) -> tuple[str, Exception]:
    """The innermost part that cannot be pickled, and the reason."""
    for name, part in _parts(path, value) if deepest else ():
        if (refusal := _refusal(part)) is not None:
            return _cause(name, part, refusal, deepest - 1)
    return path, error


def _parts(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{path}[{index}]", part) for index, part in enumerate(value))
    else:
        yield from ((f"{path}.{name}", part) for name, part in getattr(value, "__dict__", {}).items())
