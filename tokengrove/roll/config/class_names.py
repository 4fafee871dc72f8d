"""Classes by the paths in a configuration."""

from __future__ import annotations

from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.roll_modules import ours, why_absent
from tokengrove.roll.config.roll_names import installed_roll, use_roll_names
from tokengrove.rollout import imports


def resolve(path: Any, field: str = "class path") -> Any:
    """The class for `path`: ours for a path of ROLL, else the one at `package.module.Name`. Classes are returned as is.

    The module of another path may import ROLL's names even if ROLL is not installed (see use_roll_names). `field`: the
    place of the path, for errors. Raises InvalidRequest for a path that names nothing, and the exceptions of its
    module.
    """
    if isinstance(path, type):
        return path
    if not isinstance(path, str) or not path:
        raise InvalidRequest(f"{field} must be the path of a class, package.module.Name, not {path!r}", param=field)
    of_roll = path.startswith("roll.")
    if of_roll and (found := ours(path.replace(":", "."))) is not None:
        return found
    if installed_roll() is None:
        if of_roll:
            raise InvalidRequest(f"{field}: {why_absent(path.replace(':', '.'))}", param=field)
        use_roll_names()
    try:
        return imports.load(path)
    except InvalidRequest as error:
        raise InvalidRequest(f"{field}: {error}", param=field) from None
