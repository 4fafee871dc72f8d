"""Imports the object at a path: `package.module:Name`, `package.module.Name`, or a name inside a class."""

from __future__ import annotations

import importlib
from typing import Any

from tokengrove.errors import InvalidRequest


def load(path: str) -> Any:
    """Return the object at `path`. Importing its module may raise any exception.

    Raises InvalidRequest for a malformed path, a module that does not exist, and a name that the module does not have.
    """
    module_name, names = _divided(path)
    found = _module(module_name, path)
    for name in names.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise InvalidRequest(f"{path!r}: module {module_name!r} has no {names!r}") from None
    return found


def _divided(path: str) -> tuple[str, str]:
    module_name, _, names = path.rpartition(":") if ":" in path else path.rpartition(".")
    if not module_name or not all(part.isidentifier() for part in f"{module_name}.{names}".split(".")):
        raise InvalidRequest(f"{path!r} names no Python object; write package.module:Name or package.module.Name")
    return module_name, names


def _module(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but imports a module that does not
        raise InvalidRequest(f"{path!r}: there is no module {error.name!r}; is its folder on PYTHONPATH?") from None
